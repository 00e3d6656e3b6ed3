"""When a signal becomes KeyboardInterrupt: one process in test_train.py, several that agree here."""

import signal

import pytest

from sparrow_jax.interrupts import Interrupts


def agreeing(others: bool):
    """What this process says whenever the processes agree, and a stand-in for them."""
    said = []

    def agreed(heard):
        said.append(heard)
        return heard or others

    return said, agreed


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_until_all_are_between_steps(number):
    said, agreed = agreeing(others=False)
    with Interrupts(agreed=agreed) as interrupts:
        interrupts.between_steps()
        signal.raise_signal(number)
        with interrupts.deferred():
            pass
        with pytest.raises(KeyboardInterrupt):
            interrupts.between_steps()
        assert not interrupts.forced
    assert said == [False, True]


def test_a_signal_of_another_process_stops_this_one_too():
    _, agreed = agreeing(others=True)
    with Interrupts(agreed=agreed) as interrupts, pytest.raises(KeyboardInterrupt):
        interrupts.between_steps()


def test_a_cluster_may_repeat_itself_but_a_second_ctrl_c_is_meant():
    _, agreed = agreeing(others=False)
    with Interrupts(agreed=agreed) as interrupts:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert not interrupts.forced
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert interrupts.forced


def test_one_process_asks_nobody():
    with Interrupts() as interrupts:
        interrupts.between_steps()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert not interrupts.forced
