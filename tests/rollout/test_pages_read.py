"""What the cost model says that a token reads is what the sampler records."""

import dataclasses

import pytest
from sampler_setup import MIXED, make_requests


@pytest.mark.parametrize('sparse', [True, False])
def test_every_token_reads_what_the_schedule_says(sampler, sparse):
    requests = make_requests((24, 1, 15, 16, 17))
    kind = 'fixed' if sparse else 'dense'
    schedule = dataclasses.replace(sampler.schedule, kind=kind, budget_pages=MIXED)
    for request, response in zip(requests, sampler(requests, budgets=MIXED, sparse=sparse), strict=True):
        prompt = len(request.prompt_ids)
        expected = [schedule.pages_read(prompt + t) for t in range(1, len(response.tokens))]
        assert response.pages_read[1:].tolist() == expected
