"""The learner that many tests share."""

import pytest
from tiny_learner import make_tiny


@pytest.fixture(scope='session')
def packed():
    # Compiling it takes seconds.
    return make_tiny()
