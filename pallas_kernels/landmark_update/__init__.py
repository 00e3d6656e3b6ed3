"""Writes one decoded token of every sequence into its page, and the page's landmark when that token fills it."""

import jax

from pallas_kernels.checks import check_arrays, check_bools, check_floats, check_integers, check_pages, check_shapes
from pallas_kernels.implementation import Implementation, check_fit, check_machine, kernel_module, named
from pallas_kernels.landmark_update import reference
from pallas_kernels.page_select.policies import SelectionPolicy, named_policy, page_mean

__all__ = ['landmark_update', 'page_mean']


def landmark_update(
    pages_KPCE: jax.Array,
    landmark_BKNA: jax.Array,
    k_BKA: jax.Array,
    v_BKA: jax.Array,
    table_BN: jax.Array,
    position_B: jax.Array,
    write_B: jax.Array,
    *,
    policy: SelectionPolicy | str = SelectionPolicy.BLOCK_MEAN,
    implementation: Implementation | str = Implementation.REFERENCE,
) -> tuple[jax.Array, jax.Array]:
    """Writes the key and value of one token per sequence at its position.

    pages[k, table[b, p // C], :, p % C] = (k[b], v[b]) with p = position[b]; when p is the page's last token,
    landmark[b, :, p // C] = what the policy keeps of the page's stored keys: by default their mean in float32, token
    order, rounded once; under 'quest' their smallest and largest numbers, as stored.

    Args:
        pages_KPCE: the pool, any float dtype. Donate it: nothing but the tokens written changes.
        landmark_BKNA: landmarks of the slots' logical pages, A numbers each (2 A under 'quest').
        k_BKA, v_BKA: the token's key (after RoPE and QK-norm) and value; rounded to the pool's dtype.
        table_BN: int32 physical page of each logical page.
        position_B: int32 position of the token, 0 <= position < N * C.
        write_B: bool; sequences with False write nothing.
        policy: of `page_select.policies`; it says what a landmark is.
        implementation: of `pallas_kernels.implementation`; kernels have 'block_mean' alone.

    Returns:
        The pool and the landmarks. No gradients are meant to flow.

    Raises:
        ValueError: shapes, dtypes, the page size or the policy do not fit each other or the implementation.
    """
    implementation = named('landmark_update', implementation)
    policy = named_policy('landmark_update', policy, implementation)
    check_arrays('landmark_update', k_BKA=k_BKA)
    sizes = check_shapes(
        'landmark_update',
        {
            'pages_KPCE': (pages_KPCE, 'KPCE'),
            'landmark_BKNA': (landmark_BKNA, 'BKNW'),
            'k_BKA': (k_BKA, 'BKA'),
            'v_BKA': (v_BKA, 'BKA'),
            'table_BN': (table_BN, 'BN'),
            'position_B': (position_B, 'B'),
            'write_B': (write_B, 'B'),
        },
        E=2 * k_BKA.shape[-1],
        W=policy.landmark_width(k_BKA.shape[-1]),
    )
    check_pages('landmark_update', sizes['C'])
    check_integers('landmark_update', table_BN=table_BN, position_B=position_B)
    check_floats('landmark_update', pages_KPCE=pages_KPCE, landmark_BKNA=landmark_BKNA, k_BKA=k_BKA, v_BKA=v_BKA)
    check_bools('landmark_update', write_B=write_B)
    arguments = pages_KPCE, landmark_BKNA, k_BKA, v_BKA, table_BN, position_B, write_B
    if implementation is Implementation.REFERENCE:
        return reference.landmark_update(*arguments, policy)
    check_fit('landmark_update', sizes['A'], 1, pages_KPCE.dtype)
    check_machine('landmark_update', implementation, k_BKA)
    kernel = kernel_module('landmark_update', implementation)
    return kernel.landmark_update(*arguments, interpret=implementation.interpreted)
