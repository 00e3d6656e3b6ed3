"""The kernels around the attention of a decode step: definitions against float64 NumPy, the GPU's against those."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import lower_for_h200
from jitted_operations import over

from pallas_kernels.implementation import Implementation, kernel_module
from pallas_kernels.pallas_gpu import MULTIPROCESSORS
from pallas_kernels.residual_norm import cases as norm_cases
from pallas_kernels.residual_norm import residual_norm
from pallas_kernels.rotate_and_write import cases as rotate_cases
from pallas_kernels.rotate_and_write import rotate_and_write
from pallas_kernels.skinny_matmul import cases as matmul_cases
from pallas_kernels.skinny_matmul import skinny_matmul, tuning, why_unfit

INTERPRETED = Implementation.MOSAIC_GPU_INTERPRETED
ROUNDED = {'bfloat16': 2**-8, 'float32': 3e-6}  # relative to the largest number of a result
FITTING = [case for case in matmul_cases.CASES if case.dtype == 'bfloat16']


def wide(array):
    return np.asarray(array).astype(np.float64)


def assert_close(actual, expected, tolerance):
    actual, expected = wide(actual), wide(expected)
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


# ---------------------------------------------------------------------- definitions


@over(matmul_cases.CASES)
def test_skinny_matmul_is_the_product(case):
    arguments = case.arguments()
    products = [wide(arguments['x_BD']) @ wide(weight) for weight in arguments['weights']]
    y = skinny_matmul(**arguments)
    if case.gated:
        assert y.dtype == jnp.dtype(case.dtype)
        assert_close(y, products[0] / (1 + np.exp(-products[0])) * products[1], ROUNDED[case.dtype])
    else:
        assert y.dtype == jnp.float32
        assert_close(y.sum(axis=0), np.concatenate(products, axis=1), ROUNDED['float32'])


@over(norm_cases.CASES)
def test_residual_norm_is_the_norm_of_the_rounded_sum(case):
    arguments = case.arguments()
    total, norm = residual_norm(**arguments)
    exact = wide(arguments['x_BD']) + wide(arguments['parts_SBD']).sum(axis=0)
    assert_close(total, exact, ROUNDED[case.dtype])
    scale = wide(arguments['scale_D']) / np.sqrt((wide(total) ** 2).mean(axis=1, keepdims=True) + 1e-6)
    assert_close(norm, wide(total) * scale, ROUNDED[case.dtype])


@over(rotate_cases.CASES)
def test_rotate_and_write_normalizes_turns_and_writes(case):
    arguments = case.arguments(free=np.nan)
    q_BHA, pages_KPCE, _ = rotate_and_write(**arguments)
    K, A, C = case.cache.kv_heads, case.cache.head_dim, case.cache.page_tokens
    sequences = len(case.cache.positions)
    heads_BhA = wide(arguments['parts_SBF'])[:, :sequences].sum(axis=0).reshape(sequences, -1, A)
    H = case.group * K
    angle = wide(arguments['cos_BR']) + 1j * wide(arguments['sin_BR'])

    def finished(x_BhA, which):
        if case.normalized:
            x_BhA = x_BhA / np.sqrt((x_BhA**2).mean(axis=-1, keepdims=True) + 1e-6) * wide(arguments['norms'][which])
        turned = (x_BhA[..., : A // 2] + 1j * x_BhA[..., A // 2 :]) * angle[:, None]
        return np.concatenate([turned.real, turned.imag], axis=-1)

    assert_close(q_BHA, finished(heads_BhA[:, :H], 0), ROUNDED[case.cache.dtype])
    k_BKA, v_BKA = finished(heads_BhA[:, H : H + K], 1), heads_BhA[:, H + K :]
    for b, (position, writes) in enumerate(zip(case.cache.positions, case.cache.write, strict=True)):
        page, offset = divmod(position, C)
        stored_KE = wide(pages_KPCE[:, arguments['table_BN'][b, page], offset])
        if writes:
            assert_close(stored_KE, np.concatenate([k_BKA[b], v_BKA[b]], axis=-1), ROUNDED[case.cache.dtype])
        else:
            assert np.isnan(stored_KE).all()


# ---------------------------------------------------------------------- kernels


def assert_kernel_multiplies(case, implementation, at_rest):
    arguments = case.arguments()
    run = functools.partial(skinny_matmul, gated=case.gated, weights_at_rest=at_rest, implementation=implementation)
    y = jax.jit(run)(arguments['x_BD'], arguments['weights'])
    expected = skinny_matmul(**arguments)
    if case.gated:
        assert_close(y, expected, ROUNDED['bfloat16'])
    else:
        assert_close(y.sum(axis=0), expected.sum(axis=0), ROUNDED['float32'])


def assert_kernel_adds(case, implementation):
    arguments = case.arguments()
    eps = arguments.pop('eps')
    actual = jax.jit(functools.partial(residual_norm, eps=eps, implementation=implementation))(**arguments)
    for a, b in zip(actual, residual_norm(**arguments, eps=eps), strict=True):
        assert_close(a, b, ROUNDED[case.dtype])


def assert_kernel_rotates(case, implementation):
    """Which tokens are written is compared bit by bit, NaN included, their numbers up to rounding."""
    arguments = case.arguments(free=np.nan)
    eps = arguments.pop('eps')
    actual = jax.jit(functools.partial(rotate_and_write, eps=eps, implementation=implementation))(**arguments)
    for a, b in zip(actual, rotate_and_write(**arguments, eps=eps), strict=True):
        a, b = wide(a), wide(b)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        assert_close(np.nan_to_num(a), np.nan_to_num(b), ROUNDED[case.cache.dtype])


@over(FITTING)
def test_interpreted_kernel_multiplies(case):
    assert_kernel_multiplies(case, INTERPRETED, at_rest=case.gated)


@pytest.mark.parametrize('gated', [False, True])
def test_stages_are_filled_again_and_splits_may_have_no_steps(gated):
    """Five steps: through two stages, and by twos in four splits, of which the last has none."""
    case = matmul_cases.Case('steps', 8, 320, (64, 64), gated=gated)
    arguments, blocks = case.arguments(), tuning.HopperBlocks(columns=64, depth=64, stages=2, splits=4)
    kernel = kernel_module('skinny_matmul', INTERPRETED)
    x_BD, weights = arguments['x_BD'], tuple(arguments['weights'])
    y = kernel.skinny_matmul(x_BD, weights, gated=gated, weights_at_rest=True, interpret=True, blocks=blocks)
    expected = skinny_matmul(**arguments)
    if gated:
        assert_close(y, expected, ROUNDED['bfloat16'])
    else:
        assert y.shape[0] == 4
        assert_close(y.sum(axis=0), expected.sum(axis=0), ROUNDED['float32'])
        assert not np.asarray(y[3]).any()


@over(norm_cases.CASES)
def test_interpreted_kernel_adds(case):
    assert_kernel_adds(case, INTERPRETED)


@over(rotate_cases.CASES)
def test_interpreted_kernel_rotates(case):
    assert_kernel_rotates(case, INTERPRETED)


@pytest.mark.parametrize('case', matmul_cases.LARGE, ids=lambda case: case.name)
def test_blocks_fit_a_multiprocessor_and_cover_the_depth(case):
    rows = -(-case.rows // 8) * 8
    blocks = tuning.hopper_blocks(rows, case.depth, case.columns, case.gated)
    assert blocks.shared_bytes(rows, 2 if case.gated else 1) < 227 << 10
    assert case.depth % blocks.depth == 0
    assert not any(number % blocks.columns for number in case.columns)
    assert blocks.splits * 4 * blocks.depth <= case.depth


@pytest.mark.parametrize('rows', [8, 32, 40, 96, 128])
@pytest.mark.parametrize(('depth', 'columns'), [(2048, (2048, 1024, 1024)), (6144, (2048,)), (4096, (4096,))])
def test_all_blocks_of_a_product_are_on_the_device_at_once(rows, depth, columns):
    blocks = tuning.hopper_blocks(rows, depth, columns, gated=False)
    number = sum(columns) // blocks.columns * blocks.splits
    room = min(tuning.SHARED_BYTES // blocks.shared_bytes(rows, 1), 2) * MULTIPROCESSORS
    assert 0.9 * room <= number <= room


@pytest.mark.parametrize(('rows', 'depth'), [(64, 2048), (96, 2048), (96, 2112), (128, 4096)])
def test_gated_blocks_fit_with_any_rows(rows, depth):
    blocks = tuning.hopper_blocks(rows, depth, (6144, 6144), gated=True)
    assert blocks.shared_bytes(rows, 2) <= tuning.SHARED_BYTES
    assert depth % blocks.depth == 0


def test_production_sizes_lower_for_an_h200_in_place():
    array = jax.ShapeDtypeStruct
    float32, bfloat16, int32 = jnp.float32, jnp.bfloat16, jnp.int32
    multiply = lambda x, *w: skinny_matmul(x, w, gated=True, weights_at_rest=True, implementation='mosaic_gpu')
    lower_for_h200(multiply, array((64, 4096), bfloat16), *[array((4096, 12288), bfloat16)] * 2)
    add = functools.partial(residual_norm, eps=1e-6, implementation='mosaic_gpu')
    lower_for_h200(add, array((64, 2560), bfloat16), array((6, 64, 2560), float32), array((2560,), float32))

    def rotate(pages, landmarks, parts, q_scale, k_scale, *rest):
        norms = q_scale, k_scale
        return rotate_and_write(pages, landmarks, parts, norms, *rest, eps=1e-6, implementation='mosaic_gpu')

    B, K, G, A, C, N = 64, 8, 4, 128, 16, 2048
    text = lower_for_h200(
        rotate,
        array((K, B * N, C, 2 * A), bfloat16),
        array((B, K, N, A), bfloat16),
        array((4, B, (G + 2) * K * A), float32),
        *[array((A,), float32)] * 2,
        *[array((B, A // 2), float32)] * 2,
        array((B, N), int32),
        array((B,), int32),
        array((B,), jnp.bool_),
    ).as_text()
    call = next(line for line in text.splitlines() if 'mosaic_gpu' in line and 'custom_call' in line)
    aliases = call.split('output_operand_aliases')[1]
    for operand in (7, 8):
        assert aliases.count(f'operand_index = {operand}') == 1, 'the cache is not written in place'


@pytest.mark.gpu
@pytest.mark.parametrize('at_rest', [False, True])
@over((*FITTING, *matmul_cases.LARGE))
def test_kernel_multiplies(case, at_rest):
    assert_kernel_multiplies(case, Implementation.MOSAIC_GPU, at_rest)


@pytest.mark.gpu
@over((*norm_cases.CASES, *norm_cases.LARGE))
def test_kernel_adds(case):
    assert_kernel_adds(case, Implementation.MOSAIC_GPU)


@pytest.mark.gpu
@over((*rotate_cases.CASES, *rotate_cases.LARGE))
def test_kernel_rotates(case):
    assert_kernel_rotates(case, Implementation.MOSAIC_GPU)


@pytest.mark.gpu
def test_weights_that_the_program_makes_are_waited_for():
    """Not at rest: what writes them may still run when the kernel's blocks start."""
    case = matmul_cases.LARGE[0]
    arguments = case.arguments()

    @jax.jit
    def run(x_BD, weights):
        made = [jnp.sin(jnp.cos(weight.astype(jnp.float32))).astype(weight.dtype) for weight in weights]
        return skinny_matmul(x_BD, made, implementation='mosaic_gpu').sum(axis=0), made

    for _ in range(5):
        y, made = run(arguments['x_BD'], arguments['weights'])
        assert_close(y, skinny_matmul(arguments['x_BD'], made).sum(axis=0), ROUNDED['float32'])


# ---------------------------------------------------------------------- arguments


def refuse(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_arguments_that_do_not_fit_are_refused_by_name():
    arguments = matmul_cases.CASES[0].arguments()
    x_BD, [weight] = arguments['x_BD'], arguments['weights']
    refuse(lambda: skinny_matmul(x_BD, []), 'got 0 weights; must be 1 to 8')
    refuse(lambda: skinny_matmul(x_BD, [weight] * 9), 'got 9 weights; must be 1 to 8')
    refuse(lambda: skinny_matmul(x_BD, [weight], gated=True), 'got 1 weights; must be 2')
    refuse(lambda: skinny_matmul(x_BD, [weight[1:]]), r'weights\[0\]')
    refuse(lambda: skinny_matmul(x_BD, [weight.astype(jnp.float32)]), r'weights\[0\] must have the dtype')
    refuse(lambda: skinny_matmul(x_BD, [weight], implementation='mosaic_tpu'), 'no such kernel for TPUs')
    arguments = norm_cases.CASES[0].arguments()
    refuse(lambda: residual_norm(**arguments | {'scale_D': arguments['scale_D'][1:]}), 'scale_D')
    refuse(lambda: residual_norm(**arguments | {'parts_SBD': arguments['parts_SBD'][0]}), 'parts_SBD')
    narrow = {name: array[..., :96] if name != 'eps' else array for name, array in arguments.items()}
    refuse(lambda: residual_norm(**narrow, implementation=INTERPRETED), 'multiples of 128')
    arguments = rotate_cases.CASES[0].arguments()
    refuse(lambda: rotate_and_write(**arguments | {'parts_SBF': arguments['parts_SBF'][..., :512]}), 'parts_SBF')
    refuse(lambda: rotate_and_write(**arguments | {'parts_SBF': arguments['parts_SBF'][:, :2]}), 'parts_SBF has 2 rows')
    refuse(lambda: rotate_and_write(**arguments | {'write_B': arguments['position_B']}), 'write_B must be bool')
    refuse(lambda: rotate_and_write(**arguments | {'norms': (arguments['cos_BR'][0],) * 2}), r'norms\[0\]')


def test_products_that_the_kernel_does_not_take_have_a_reason():
    assert why_unfit(16, 2048, [4096], jnp.bfloat16) is None
    assert 'float32' in why_unfit(16, 2048, [4096], jnp.float32)
    assert '129' in why_unfit(129, 2048, [4096], jnp.bfloat16)
    assert 'multiples of 64, not 2000 rows' in why_unfit(16, 2000, [4096], jnp.bfloat16)
    assert 'multiples of 64, not 2048 rows and 128 and 100 columns' in why_unfit(16, 2048, [128, 100], jnp.bfloat16)
