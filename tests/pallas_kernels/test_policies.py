"""Selection policies: each against its formula in NumPy, what it keeps of a page, and what all of them share."""

import copy
import dataclasses
import pickle

import jax.numpy as jnp
import jitted_operations
import numpy as np
import numpy_reference
import pytest

from pallas_kernels.implementation import Implementation
from pallas_kernels.landmark_update import cases as landmark_cases
from pallas_kernels.landmark_update import landmark_update
from pallas_kernels.page_select import cases as select_cases
from pallas_kernels.page_select import page_select, policies
from pallas_kernels.page_select.policies import SelectionPolicy, policy_names, register_policy

POLICIES = [policy.value for policy in SelectionPolicy]
KERNELS = [name for name in Implementation if name is not Implementation.REFERENCE]
C = 8  # page_tokens of what is made by hand here
_SELECT = {case.name: case for case in select_cases.CASES}
# Of random numbers: no two scores are close enough for the order of a sum to matter.
SCORED = [_SELECT[name] for name in ('small', 'g4_a128_c16', 'bf16_g2_a128_c16')]
WRITTEN = [case for case in landmark_cases.CASES if case.page_tokens <= 32 and case.pages <= 5]


def as_numpy(arguments):
    return {name: np.asarray(value) if hasattr(value, 'dtype') else value for name, value in arguments.items()}


def select_arguments(case, policy, seed=0, free=0.0):
    """Like `case.arguments`, with the policy's landmarks."""
    arguments = case.arguments(seed, free)
    if policy == 'quest':
        one, other = arguments['landmark_BKNA'], case.arguments(seed + 100, free)['landmark_BKNA']
        arguments['landmark_BKNA'] = jnp.concatenate([jnp.minimum(one, other), jnp.maximum(one, other)], axis=-1)
    return arguments | {'policy': policy}


def chosen(policy, q_GA, pages_NCA, budget, reserved_first=1, reserved_last=1):
    """Pages that one group of heads reads of a full sequence with these keys."""
    landmark_NW = SelectionPolicy(policy).landmark(jnp.asarray(pages_NCA, jnp.float32))
    pages = len(pages_NCA)
    ids_BKM, count_B = jitted_operations.page_select(
        jnp.asarray(q_GA, jnp.float32)[None],
        landmark_NW[None, None],
        jnp.asarray([pages * C], jnp.int32),
        jnp.asarray([budget], jnp.int32),
        page_tokens=C,
        max_pages=pages,
        reserved_first=reserved_first,
        reserved_last=reserved_last,
        policy=policy,
    )
    return ids_BKM[0, 0, : count_B[0]].tolist()


# ---------------------------------------------------------------------- selection


@pytest.mark.parametrize('policy', POLICIES)
@pytest.mark.parametrize('case', SCORED, ids=lambda case: case.name)
def test_pages_are_those_of_the_formula(case, policy):
    for seed in range(3):
        arguments = select_arguments(case, policy, seed)
        ids_BKM, count_B = jitted_operations.page_select(**arguments)
        expected_BKM, expected_B = numpy_reference.page_select(**as_numpy(arguments))
        np.testing.assert_array_equal(count_B, expected_B)
        np.testing.assert_array_equal(ids_BKM, expected_BKM)


def test_policies_disagree():
    """Else one of them could stand for another above."""
    case = SCORED[1]
    pages = {
        policy: np.asarray(jitted_operations.page_select(**select_arguments(case, policy))[0]) for policy in POLICIES
    }
    for one, other in (('block_mean', 'quest'), ('block_mean', 'group_softmax'), ('quest', 'group_softmax')):
        assert (pages[one] != pages[other]).any()


@pytest.mark.parametrize('policy', POLICIES)
def test_equal_scores_choose_the_lower_page(policy):
    """Every page has one of three landmarks of small whole numbers, so that sums are exact and most pages tie."""
    case = dataclasses.replace(_SELECT['g8_a128_c32_ties'], exact=False)
    arguments = case.arguments()
    rng = np.random.default_rng(1)
    B, K, N, A = arguments['landmark_BKNA'].shape
    width = SelectionPolicy(policy).landmark_width(A)
    kinds_3W = np.sort(rng.integers(-2, 3, (3, width // A, A)), axis=1).reshape(3, width)  # min below max
    kind_BKN = rng.integers(0, 3, (B, K, N))
    arguments |= {
        'q_BHA': jnp.asarray(rng.integers(-1, 2, arguments['q_BHA'].shape) * 8, jnp.float32),
        'landmark_BKNA': jnp.asarray(kinds_3W[kind_BKN], jnp.float32),
        'policy': policy,
    }
    ids_BKM, count_B = jitted_operations.page_select(**arguments)
    expected_BKM, expected_B = numpy_reference.page_select(**as_numpy(arguments))
    np.testing.assert_array_equal(count_B, expected_B)
    np.testing.assert_array_equal(ids_BKM, expected_BKM)
    tied = 0
    for b, k in np.ndindex(B, K):
        read = set(ids_BKM[b, k, : count_B[b]].tolist())
        others = range(case.reserved_first, -(-case.lengths[b] // case.page_tokens) - case.reserved_last)
        left_out = {kind_BKN[b, k, n] for n in others if n not in read}
        tied += len(left_out & {kind_BKN[b, k, n] for n in others if n in read})
    assert tied, 'the budget ends between ties in no sequence'


@pytest.mark.parametrize('policy', POLICIES)
def test_reserved_pages_are_read_whatever_they_score(policy):
    pages_NCA = np.zeros((7, C, 4), np.float32)
    pages_NCA[:, :, 0] = np.asarray([-9, 5, 4, 3, 2, -9, -9])[:, None]
    q_GA = np.eye(4)[:1]
    assert chosen(policy, q_GA, pages_NCA, 0, 1, 2) == [0, 5, 6]
    assert chosen(policy, q_GA, pages_NCA, 2, 1, 2) == [0, 1, 2, 5, 6]
    assert chosen(policy, q_GA, pages_NCA, 2, 0, 1) == [1, 2, 6]
    assert chosen(policy, q_GA, pages_NCA, 9, 1, 2) == list(range(7))


@pytest.mark.parametrize('policy', POLICIES)
def test_landmarks_of_pages_that_are_not_full_are_not_looked_at(policy):
    """Not in a softmax over pages either. A sequence of one page has no landmark at all."""
    for case in SCORED:
        assert any(length % case.page_tokens for length in case.lengths)
        clean = jitted_operations.page_select(**select_arguments(case, policy))
        for free in (np.nan, np.inf, 1e30):
            unclean = jitted_operations.page_select(**select_arguments(case, policy, free=free))
            for array, expected in zip(unclean, clean, strict=True):
                np.testing.assert_array_equal(array, expected)


def test_quest_reads_the_page_of_the_one_key_that_a_mean_hides():
    pages_NCA = np.zeros((5, C, 2), np.float32)
    pages_NCA[1, :, 0] = 1
    pages_NCA[2, :, 0] = -1
    pages_NCA[2, 3, 0] = 5
    pages_NCA[3, :, 0] = -4
    assert chosen('quest', [[1, 0]], pages_NCA, 1) == [0, 2, 4]
    assert chosen('quest', [[-1, 0]], pages_NCA, 1) == [0, 3, 4]
    assert chosen('block_mean', [[1, 0]], pages_NCA, 1) == [0, 1, 4]


def test_quest_reads_what_one_head_of_a_group_wants():
    pages_NCA = np.zeros((4, C, 2), np.float32)
    pages_NCA[1] = [6, -6]  # bounds 6 and -6
    pages_NCA[2] = [4, 4]  # 4 and 4, the better mean
    assert chosen('quest', np.eye(2), pages_NCA, 1) == [0, 1, 3]
    assert chosen('block_mean', np.eye(2), pages_NCA, 1) == [0, 2, 3]


def test_a_quest_score_bounds_every_heads_product_with_every_key_of_the_page():
    rng = np.random.default_rng(2)
    q_BKGA = rng.standard_normal((2, 2, 3, 16)).astype(np.float32)
    keys_BKNCA = rng.standard_normal((2, 2, 6, C, 16)).astype(np.float32)
    quest = SelectionPolicy.QUEST
    score_BKN = np.asarray(quest.scores(q_BKGA, quest.landmark(jnp.asarray(keys_BKNCA)), jnp.ones((2, 6), bool)))
    best_BKN = np.einsum('bkga,bknca->bkngc', q_BKGA, keys_BKNCA).max(axis=(-2, -1))
    assert (score_BKN >= best_BKN - 1e-5).all()
    # It is reached where all keys of a page are the same.
    same_BKNCA = np.repeat(keys_BKNCA[..., :1, :], C, axis=-2)
    score_BKN = np.asarray(quest.scores(q_BKGA, quest.landmark(jnp.asarray(same_BKNCA)), jnp.ones((2, 6), bool)))
    best_BKN = np.einsum('bkga,bknca->bkngc', q_BKGA, same_BKNCA).max(axis=(-2, -1))
    np.testing.assert_allclose(score_BKN, best_BKN, rtol=0, atol=1e-5)


def test_group_softmax_gives_every_head_the_same_weight():
    """The first head is ten times as loud and wants pages 1 and 3; the other wants page 2."""
    pages_NCA = np.zeros((5, C, 4), np.float32)
    pages_NCA[1, :, 0] = 0.5  # scores of the heads 2.5 and 0; weights .49 and .09
    pages_NCA[2, :, 1] = 4  # 0 and 2; .04 and .65
    pages_NCA[3, :, 0] = 0.45  # 2.25 and 0; .38 and .09
    q_GA = np.asarray([[10, 0, 0, 0], [0, 1, 0, 0]])
    assert chosen('group_softmax', q_GA, pages_NCA, 2) == [0, 1, 2, 4]
    assert chosen('block_mean', q_GA, pages_NCA, 2) == [0, 1, 3, 4]


@pytest.mark.parametrize('reserved', [0, 3])
def test_group_softmax_counts_what_a_head_spends_on_reserved_pages(reserved):
    """The first head has its weight there, on the first or the newest page, so that the second head's wish counts."""
    pages_NCA = np.zeros((4, C, 2), np.float32)
    pages_NCA[reserved, :, 0] = 20
    pages_NCA[1, :, 0] = 6
    pages_NCA[2, :, 1] = 4
    assert chosen('group_softmax', np.eye(2), pages_NCA, 1) == [0, 2, 3]
    pages_NCA[reserved, :, 0] = 0
    assert chosen('group_softmax', np.eye(2), pages_NCA, 1) == [0, 1, 3]


def test_group_softmax_orders_pages_whose_weight_is_too_small_for_float32():
    pages_NCA = np.zeros((6, C, 1), np.float32)
    pages_NCA[:, :, 0] = np.asarray([0, -400, -300, -200, -100, 0])[:, None]
    assert chosen('group_softmax', [[1]], pages_NCA, 2) == [0, 3, 4, 5]


# ---------------------------------------------------------------------- landmarks


@pytest.mark.parametrize('policy', POLICIES)
@pytest.mark.parametrize('case', WRITTEN, ids=lambda case: case.name)
def test_landmark_update_keeps_what_the_policy_says(case, policy):
    arguments = case.arguments() | {'policy': policy}
    if policy == 'quest':
        arguments['landmark_BKNA'] = jnp.tile(arguments['landmark_BKNA'], 2)
    pages_KPCE, landmark_BKNA = map(np.asarray, jitted_operations.landmark_update(**arguments))
    expected_KPCE, expected_BKNA = numpy_reference.landmark_update(**as_numpy(arguments))
    np.testing.assert_array_equal(pages_KPCE, expected_KPCE)
    exact = policy == 'quest'
    tolerance = 0 if exact else {'float32': 1e-6, 'bfloat16': 2**-8}[case.dtype]
    np.testing.assert_allclose(landmark_BKNA.astype(np.float64), expected_BKNA, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_quest_keeps_the_extremes_of_each_page_as_it_fills(dtype):
    K, A, N = 2, 4, 3
    rng = np.random.default_rng(3)
    keys_TKA = (rng.standard_normal((2 * C + 3, K, A)) * 10.0 ** rng.integers(-3, 6, (2 * C + 3, K, A))).astype(
        jnp.dtype(dtype)
    )
    pages_KPCE = jnp.full((K, N + 1, C, 2 * A), np.nan, dtype)
    landmark_BKNW = jnp.full((1, K, N, 2 * A), np.nan, dtype)
    for position, k_KA in enumerate(keys_TKA):
        pages_KPCE, landmark_BKNW = jitted_operations.landmark_update(
            pages_KPCE,
            landmark_BKNW,
            jnp.asarray(k_KA)[None],
            jnp.asarray(-k_KA)[None],
            jnp.asarray([[2, 3, 1]], jnp.int32),
            jnp.asarray([position], jnp.int32),
            jnp.asarray([True]),
            policy='quest',
        )
        full = (position + 1) // C
        pages_NCKA = keys_TKA[: full * C].reshape(full, C, K, A)
        expected_NKW = np.concatenate([pages_NCKA.min(axis=1), pages_NCKA.max(axis=1)], axis=-1)
        landmark_KNW = np.asarray(landmark_BKNW[0])
        np.testing.assert_array_equal(landmark_KNW[:, :full], expected_NKW.swapaxes(0, 1))
        assert np.isnan(landmark_KNW[:, full:].astype(np.float32)).all()


def test_landmark_widths():
    assert [policy.landmark_width(128) for policy in SelectionPolicy] == [128, 256, 128]
    for policy in SelectionPolicy:
        assert policy.landmark(jnp.ones((3, C, 128))).shape == (3, policy.landmark_width(128))


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ('operation', 'case'), [(page_select, select_cases.CASES[3]), (landmark_update, landmark_cases.CASES[3])]
)
class TestRefused:
    @pytest.mark.parametrize('policy', ['quest', 'group_softmax'])
    @pytest.mark.parametrize('implementation', KERNELS)
    def test_kernels_of_another_policy(self, operation, case, policy, implementation):
        with pytest.raises(ValueError, match=f"^{operation.__name__}: policy='{policy}' has no kernels; .*'reference'"):
            operation(**case.arguments(), policy=policy, implementation=implementation)

    def test_an_unknown_policy(self, operation, case):
        message = f"^{operation.__name__}: policy='mean': must be one of block_mean, quest, group_softmax$"
        with pytest.raises(ValueError, match=message):
            operation(**case.arguments(), policy='mean')

    def test_landmarks_of_another_policy(self, operation, case):
        arguments = case.arguments()
        A = arguments['landmark_BKNA'].shape[-1]
        with pytest.raises(ValueError, match=rf'{operation.__name__}: landmark_BKNA .* must be {2 * A}$'):
            operation(**arguments, policy='quest')
        arguments['landmark_BKNA'] = jnp.tile(arguments['landmark_BKNA'], 2)
        with pytest.raises(ValueError, match=rf'{operation.__name__}: landmark_BKNA .* must be {A}$'):
            operation(**arguments)


@pytest.mark.parametrize('policy', SelectionPolicy)
def test_what_runs_a_policy_beside_kernels(policy):
    kernels, why = policy.implementation(Implementation.MOSAIC_TPU)
    if policy is SelectionPolicy.BLOCK_MEAN:
        assert (kernels, why) == (Implementation.MOSAIC_TPU, '')
    else:
        assert kernels is Implementation.REFERENCE
        assert f'schedule.policy={policy} has no kernels' in why
    assert policy.implementation(Implementation.REFERENCE) == (Implementation.REFERENCE, '')


# ---------------------------------------------------------------------- policies from outside


@pytest.fixture
def registry(monkeypatch):
    """As it is before anybody registers something, and again after the test."""
    monkeypatch.setattr(policies, '_RULES', dict(policies._RULES))
    monkeypatch.setattr(policies, '_REGISTERED', {})


def oldest(q_BKGA, landmark_BKNW, _full_BN):
    return jnp.broadcast_to(-jnp.arange(landmark_BKNW.shape[2]), (*q_BKGA.shape[:2], landmark_BKNW.shape[2]))


def newest(*arguments):
    return -oldest(*arguments)


@pytest.mark.usefixtures('registry')
class TestRegistered:
    keys_NCA = np.ones((6, C, 16))
    q_GA = np.ones((2, 16))

    def test_it_chooses_pages_and_is_known_by_its_name(self):
        policy = register_policy('oldest', oldest)
        assert chosen('oldest', self.q_GA, self.keys_NCA, budget=2) == [0, 1, 2, 5]
        assert SelectionPolicy('oldest') is policy
        assert (f'{policy}', policy.value, policy_names()[-1]) == ('oldest',) * 3
        assert copy.deepcopy(policy) is pickle.loads(pickle.dumps(policy)) is policy
        kernels, why = policy.implementation(Implementation.MOSAIC_GPU)
        assert kernels is Implementation.REFERENCE
        assert 'schedule.policy=oldest has no kernels' in why

    def test_the_package_has_as_many_policies_as_before(self):
        register_policy('oldest', oldest)
        assert 'oldest' not in list(SelectionPolicy)
        assert policy_names() == (*SelectionPolicy, 'oldest')

    def test_a_new_rule_of_the_same_name_takes_the_place_of_what_was_compiled(self):
        register_policy('mine', oldest)
        assert chosen('mine', self.q_GA, self.keys_NCA, budget=2) == [0, 1, 2, 5]
        register_policy('mine', newest)
        assert chosen('mine', self.q_GA, self.keys_NCA, budget=2) == [0, 3, 4, 5]
        assert policy_names().count('mine') == 1

    def test_landmarks_of_its_own(self):
        policy = register_policy('bounds', policies.quest, policies.page_extremes, keys_wide=2)
        keys_NCA = np.random.default_rng(0).normal(size=(6, C, 16))
        assert policy.landmark_width(16) == 32
        picked = [chosen(name, self.q_GA, keys_NCA, budget=2) for name in ('bounds', 'quest')]
        assert picked[0] == picked[1]

    @pytest.mark.parametrize(
        ('changes', 'message'),
        [
            ({'name': 'quest'}, "name='quest': is one of the package"),
            ({'name': 'a/b'}, "name='a/b': must be a Python identifier"),
            ({'keys_wide': 2}, r'landmark made \(1, 2, 5, 16\) of keys .* keys_wide=2 it must be \(1, 2, 5, 32\)'),
            ({'scores': lambda q, landmark, full: oldest(q, landmark, full)[0]}, r'scores made \(2, 5\) of q'),
        ],
    )
    def test_what_does_not_fit_is_refused_and_leaves_nothing(self, changes, message):
        with pytest.raises(ValueError, match=f'^register_policy: .*{message}'):
            register_policy(**{'name': 'mine', 'scores': oldest} | changes)
        assert policy_names() == tuple(SelectionPolicy)
