"""Arguments of the stability experiment's configuration."""

import pytest

from configs import stability
from sparrow_jax.config import resolve
from sparrow_jax.models.shape import DecoderShape


@pytest.mark.parametrize(
    ('arm', 'kind', 'pages', 'target'),
    [
        ('dense', 'dense', None, None),
        ('fixed,7', 'fixed', 7, None),
        ('fixed,aggressive', 'fixed', stability.BUDGETS['aggressive'], None),
        ('fixed,lenient,gspo', 'fixed', stability.BUDGETS['lenient'], None),
        ('adaptive,0.9', 'adaptive', stability.BUDGETS['lenient'], 0.9),
    ],
)
def test_arms(arm, kind, pages, target):
    run = resolve(stability.get_config(arm))
    assert run.schedule.kind == kind
    assert pages is None or run.schedule.budget_pages == pages
    assert target is None or run.controller.target_p05 == target
    assert run.learner.ratio == ('sequence' if 'gspo' in arm else 'token')
    # Nothing else differs from the dense arm.
    dense = resolve(stability.get_config('dense'))
    assert (run.rollout, run.optimizer, run.data, run.model) == (
        dense.rollout,
        dense.optimizer,
        dense.data,
        dense.model,
    )


def test_the_start_is_dense_supervised_training_of_the_same_model():
    start, arm = resolve(stability.get_config('start')), resolve(stability.get_config('dense'))
    assert (start.phase, arm.phase, start.schedule.kind) == ('supervised', 'rl', 'dense')
    assert start.model.shape == arm.model.shape
    assert start.row_tokens == arm.row_tokens <= arm.model.shape.max_positions
    shape = DecoderShape(**stability.get_config().model.shape.to_dict())
    assert 15e6 < shape.parameter_count() < 25e6
    # What the kernels of the GPU sampler and of its fused step ask for.
    assert shape.head_dim in (64, 128)
    assert all(n % 128 == 0 for n in (shape.d_model, shape.d_ff, shape.kv_heads * shape.head_dim))
    assert arm.rollout.slots <= 128


def test_the_adapter_is_a_word_of_its_own():
    plain, distilled = (resolve(stability.get_config(arm)) for arm in ('adaptive,0.9', 'adaptive,0.9,distill'))
    assert (plain.distill.enabled, distilled.distill.enabled) == (False, True)
    assert plain.controller == distilled.controller


@pytest.mark.parametrize('order', ['small,start', 'start,small'])
def test_forms_work_in_any_order(order):
    run = resolve(stability.get_config(order))
    assert (run.phase, run.model.random_weights, run.model.shape.d_model) == ('supervised', True, 64)


@pytest.mark.parametrize('form', ['', ',small', ',smoke'])
def test_fixed_arms_differ_in_every_form(form):
    arms = [resolve(stability.get_config(f'fixed,{name}{form}')) for name in ('aggressive', 'middle', 'lenient')]
    pages = [run.schedule.budget_pages for run in arms]
    assert pages == sorted(set(pages))


@pytest.mark.parametrize('arm', ['dense', 'fixed,aggressive', 'adaptive,0.9'])
def test_smoke_keeps_the_arm(arm):
    run = resolve(stability.get_config(f'{arm},smoke'))
    assert run.schedule.kind == arm.split(',')[0]
    assert (run.steps, run.model.random_weights) == (2, True)


@pytest.mark.parametrize(
    ('arg', 'message'),
    [
        ('fixed', 'fixed,: give its pages, a whole number or aggressive, middle, lenient'),
        ('fixed,0', 'fixed,0: give its pages'),
        ('fixed,smoke', 'fixed,smoke: give its pages'),
        ('adaptive', 'adaptive,: give the p05 that it holds, between 0 and 1'),
        ('adaptive,1.5', 'adaptive,1.5: give the p05'),
        ('dense,fixed,3', 'names 2 arms; give one'),
        ('dens', "dens: unknown argument; it must be '' or 'start'"),
    ],
)
def test_mistyped_arms(arg, message):
    with pytest.raises(ValueError, match=message):
        stability.get_config(arg)
