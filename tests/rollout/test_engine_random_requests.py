"""Random sets of requests through an engine with few pages: order of arrival, slots and company do not matter."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampler_setup import MAX_PROMPT, MAX_RESPONSE, assert_same, prompt_of

from sparrow_jax.rollout.pool import Request

request_lists = st.lists(
    st.builds(
        lambda number, length, sample, limit: Request(prompt_of(number, length), number, sample, limit),
        number=st.integers(0, 1000),
        length=st.integers(1, MAX_PROMPT),
        sample=st.integers(0, 7),
        limit=st.integers(1, MAX_RESPONSE),
    ),
    max_size=9,
)


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(requests=request_lists, random=st.randoms(use_true_random=False), temperature=st.sampled_from([0.0, 0.5, 1.0]))
def test_responses_follow_their_requests(small_pool, sampler, requests, random, temperature):
    responses = small_pool(requests, temperature=temperature)
    order = random.sample(range(len(requests)), len(requests))
    assert_same(small_pool([requests[i] for i in order], temperature=temperature), [responses[i] for i in order])
    assert_same(sampler(requests, temperature=temperature), responses)
    for request, response in zip(requests, responses, strict=True):
        assert 1 <= len(response.tokens) <= request.limit_tokens
        assert response.finish_reason == 'stop' or len(response.tokens) == request.limit_tokens
