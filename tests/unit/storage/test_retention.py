"""Retention: which checkpoints go, and which never."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import UsageError
from milepost.storage.retention import Candidate, KeepEvery, KeepLast, Policy, Protect, doomed
from milepost.wire.messages import Keep


def checkpoint(step: int, attempt: int = 1) -> Candidate:
    return (f"step_{step}", step, (attempt, step, 0))


STEPS = [checkpoint(step) for step in (50, 10, 30, 20, 40)]


@pytest.mark.parametrize(
    ("policy", "gone"),
    [
        (KeepLast(2), ["step_10", "step_20", "step_30"]),
        (KeepLast(9), []),
        (KeepEvery(20), ["step_10", "step_30"]),
        (KeepLast(1) | KeepEvery(20), ["step_10", "step_30"]),
        (KeepLast(1) | Protect(30), ["step_10", "step_20", "step_40"]),
        (KeepLast(1) | Protect([10, 20]) | KeepEvery(40), ["step_30"]),
        (KeepEvery(30) | KeepEvery(20), ["step_10"]),
        (Protect([10]), []),
    ],
)
def test_a_checkpoint_stays_if_any_rule_keeps_it(policy: Policy, gone: list[str]) -> None:
    assert gone == doomed(STEPS, policy.rules())


def test_no_rules_at_all_delete_nothing() -> None:
    assert [] == doomed(STEPS, Keep())


def test_the_newest_stays_whatever_the_rules_say() -> None:
    assert [] == doomed([checkpoint(7)], KeepEvery(100).rules())


def test_after_a_roll_back_the_newer_attempt_counts_as_newer_though_its_step_is_lower() -> None:
    both = [checkpoint(100, attempt=1), checkpoint(60, attempt=2)]
    assert ["step_100"] == doomed(both, KeepLast(1).rules())


def test_foreign_checkpoints_are_neither_removed_nor_counted() -> None:
    names = {"step_50", "step_10"}
    assert ["step_20", "step_30"] == doomed(STEPS, KeepLast(1).rules(), foreign=names)


def test_policies_combine_into_one_set_of_rules() -> None:
    policy = KeepLast(2) | KeepEvery(500) | Protect(3) | KeepLast(5) | Protect(iter([9, 1]))
    assert Keep(last=5, every=(500,), protect=(1, 3, 9)) == policy.rules()
    assert policy.rules() == policy.rules()


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "3", True, None])
def test_wrong_arguments_are_refused_at_once(wrong: object) -> None:
    with pytest.raises(UsageError):
        KeepLast(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        KeepEvery(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-1, [1, -1], ["a"], "12", None, [True]])
def test_wrong_steps_to_protect_are_refused_at_once(wrong: object) -> None:
    with pytest.raises(UsageError):
        Protect(wrong)  # type: ignore[arg-type]


def test_a_policy_combines_with_policies_only() -> None:
    with pytest.raises(TypeError):
        KeepLast(1) | 3  # type: ignore[operator]


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 60)).map(
            lambda pair: (f"{pair[0]}-{pair[1]}", pair[1], (pair[0], pair[1], 0))
        ),
        unique=True,
        min_size=1,
    ),
    st.builds(
        Keep,
        last=st.integers(0, 5),
        every=st.lists(st.integers(1, 20), max_size=2).map(tuple),
        protect=st.lists(st.integers(0, 60), max_size=3).map(tuple),
    ),
)
def test_the_newest_protected_and_kept_ones_never_go(
    checkpoints: list[Candidate], keep: Keep
) -> None:
    gone = doomed(checkpoints, keep)
    stays = [each for each in checkpoints if each[0] not in gone]
    assert max(each[2] for each in checkpoints) == max(each[2] for each in stays)
    assert len(stays) >= min(keep.last, len(checkpoints))
    steps_gone = {each[1] for each in checkpoints if each[0] in gone}
    assert set() == steps_gone & set(keep.protect)
    assert [] == [step for step in steps_gone if any(step % every == 0 for every in keep.every)]
    assert [] == doomed(stays, keep)
