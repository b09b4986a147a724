"""Numbers worked out by hand.

One task, four episodes. Rewards 1, 0.5, 0 and one not scored. Act rows: 1, 2, 3. Rehearse rows: 2, 1, none.
"""

import pytest
import torch

from envace.algorithms.advantages import group_advantages
from envace.algorithms.losses import kl_k3, policy_loss, token_sum
from envace.algorithms.rolewise_grpo import AlgorithmSettings, build_rows
from envace.types import EndReason, Episode, Generation, Group, Message, Role, Task

TASK = Task(id="t", messages=(Message(role="user", content="x"),))


def generation(role: Role, number: int) -> Generation:
    """A generation whose prompt is its own: nothing merges."""
    return Generation(
        role=role, turn=0, prompt_ids=(number, 1), completion_ids=(2, 3), logprobs=(-1.0, -2.0), stop_reason="stop"
    )


def episode(index: int, reward: float | None, acts: int, rehearses: int) -> Episode:
    made = [generation(Role.ACT, 100 * index + n) for n in range(acts)]
    made += [generation(Role.REHEARSE, 100 * index + 50 + n) for n in range(rehearses)]
    return Episode(
        id=f"t#{index}", task_id="t", index=index, seed=0, responder="rehearsal", messages=(), generations=tuple(made),
        end=EndReason.COMPLETED, reward=reward,
    )  # fmt: skip


def group(*episodes: Episode) -> Group:
    return Group(task=TASK, episodes=episodes)


UNEVEN = group(episode(0, 1.0, 1, 2), episode(1, 0.5, 2, 1), episode(2, 0.0, 3, 0), episode(3, None, 2, 2))


def advantages(groups: Group | list[Group], **options: object) -> dict[str, list[float]]:
    """Per role, the advantage of each row in order."""
    rows, _ = build_rows(groups if isinstance(groups, list) else [groups], AlgorithmSettings(**options))
    by_role: dict[str, list[float]] = {"act": [], "rehearse": []}
    for row in rows:
        by_role[row.role].append(row.advantages[-1])
    return by_role


def test_published_baseline_is_the_mean_over_a_roles_rows():
    got = advantages(UNEVEN)
    # Act: (1 + 0.5 + 0.5 + 0 + 0 + 0) / 6 = 1/3. Rehearse: (1 + 1 + 0.5) / 3 = 5/6.
    assert got["act"] == pytest.approx([2 / 3, 1 / 6, 1 / 6, -1 / 3, -1 / 3, -1 / 3])
    assert got["rehearse"] == pytest.approx([1 / 6, 1 / 6, -1 / 3])


def test_a_not_scored_episode_gives_no_rows_and_enters_no_baseline():
    without = group(*UNEVEN.episodes[:3])
    assert advantages(UNEVEN) == advantages(without)
    assert advantages(group(episode(0, None, 3, 3))) == {"act": [], "rehearse": []}


def test_one_baseline_for_both_roles():
    # All nine rows: (1*3 + 0.5*3 + 0*3) / 9 = 0.5.
    got = advantages(UNEVEN, scope="joint")
    assert got["act"] == pytest.approx([0.5, 0, 0, -0.5, -0.5, -0.5])
    assert got["rehearse"] == pytest.approx([0.5, 0.5, 0])


def test_episode_weighted_baseline_counts_each_episode_once():
    # Act: (1 + 0.5 + 0) / 3 = 0.5. Rehearse: (1 + 0.5) / 2 = 0.75.
    got = advantages(UNEVEN, baseline="episode")
    assert got["act"] == pytest.approx([0.5, 0, 0, -0.5, -0.5, -0.5])
    assert got["rehearse"] == pytest.approx([0.25, 0.25, -0.25])


def test_leave_one_out_compares_with_the_other_episodes():
    # Act: 1 - (0.5 + 0)/2, 0.5 - (1 + 0)/2, 0 - (1 + 0.5)/2. Rehearse: 1 - 0.5, 0.5 - 1.
    got = advantages(UNEVEN, baseline="leave_one_out")
    assert got["act"] == pytest.approx([0.75, 0, 0, -0.75, -0.75, -0.75])
    assert got["rehearse"] == pytest.approx([0.5, 0.5, -0.5])


def test_std_normalization_divides_by_the_population_deviation():
    # Rehearse rewards 1, 1, 0.5: variance (1/36 + 1/36 + 4/36) / 3 = 1/18; (1/6) / sqrt(1/18) = 0.70711.
    got = advantages(UNEVEN, normalize_std=True)
    assert got["rehearse"] == pytest.approx([0.7071068, 0.7071068, -1.4142136])


def test_a_singleton_has_nothing_to_be_compared_with():
    lone = group(episode(0, 1.0, 1, 2), episode(1, 0.0, 1, 0))
    assert advantages(lone)["rehearse"] == [0, 0]
    assert advantages(lone)["act"] == [0.5, -0.5]
    assert advantages(lone, singleton="reward")["rehearse"] == [1, 1]


@pytest.mark.parametrize("options", [{}, {"normalize_std": True}, {"baseline": "leave_one_out"}])
def test_no_variance_gives_zero_never_a_division_by_zero(options):
    assert advantages(group(episode(0, 0.3, 2, 1), episode(1, 0.3, 1, 1)), **options) == {
        "act": [0] * 3,
        "rehearse": [0] * 2,
    }


def test_groups_without_variance_are_left_out_when_asked():
    flat = group(episode(0, 1.0, 1, 0), episode(1, 1.0, 1, 0))
    rows, metrics = build_rows([UNEVEN, flat], AlgorithmSettings(drop_no_variance=True))
    assert (len(rows), metrics["groups_without_variance"]) == (9, 1)
    assert len(build_rows([UNEVEN, flat], AlgorithmSettings())[0]) == 11


def test_groups_of_different_tasks_do_not_share_a_baseline():
    got = advantages(
        [group(episode(0, 1.0, 1, 0), episode(1, 0.0, 1, 0)), group(episode(0, 0.2, 1, 0), episode(1, 0.0, 1, 0))]
    )
    assert got["act"] == pytest.approx([0.5, -0.5, 0.1, -0.1])


def test_a_frozen_role_gives_no_rows_and_a_role_weight_is_carried():
    rows, _ = build_rows([UNEVEN], AlgorithmSettings(freeze=("act",), rehearse_weight=0.25))
    assert {row.role for row in rows} == {"rehearse"}
    assert {row.weight for row in rows} == {0.25}


def test_generations_that_extend_each_other_become_one_row():
    first = Generation(
        role="act", turn=0, prompt_ids=(1, 2), completion_ids=(3, 4), logprobs=(-1.0, -2.0), stop_reason="stop"
    )
    second = Generation(
        role="act", turn=0, prompt_ids=(1, 2, 3, 4, 5), completion_ids=(6,), logprobs=(-3.0,), stop_reason="stop"
    )
    other = Generation(role="act", turn=1, prompt_ids=(9,), completion_ids=(8,), logprobs=(-4.0,), stop_reason="stop")
    made = Episode(
        id="t#0", task_id="t", index=0, seed=0, responder="rehearsal", messages=(), end=EndReason.COMPLETED, reward=1.0,
        generations=(first, second, other),
    )  # fmt: skip
    rows, _ = build_rows([group(made, episode(1, 0.0, 3, 0))], AlgorithmSettings())
    merged, apart = rows[:2]
    assert merged.ids == (1, 2, 3, 4, 5, 6)
    assert merged.mask == (0, 0, 1, 1, 0, 1)
    assert merged.advantages == (0, 0, 0.5, 0.5, 0, 0.5)
    assert merged.logprobs == (0, 0, -1, -2, 0, -3)
    assert (apart.ids, apart.mask) == ((9, 8), (0, 1))
    assert len(build_rows([group(made)], AlgorithmSettings(), merge=False)[0]) == 3


def test_group_advantages_over_plain_values():
    assert group_advantages([3, 1, 5], ["a", "a", "b"], [0, 1, 0]) == [1, -1, 0]


def test_policy_loss_clips_on_both_sides():
    log = torch.log(torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5]))
    advantage = torch.tensor([2.0, 1.0, 1.0, -1.0, -1.0])
    # ratio 1: -2. Up with gain: clipped to 1.2. Down with gain: 0.5 stays. Up with loss: 1.5 stays. Down with loss: 0.8.
    got = policy_loss(log, torch.zeros(5), advantage, 0.2, 0.2)
    assert got.tolist() == pytest.approx([-2.0, -1.2, -0.5, 1.5, 0.8])
    assert policy_loss(log, torch.zeros(5), advantage, 0.2, 0.4)[1].item() == pytest.approx(-1.4)


def test_kl_k3_by_hand():
    # d = ln 2 - 0: 2 - ln 2 - 1 = 0.306853; no difference: 0.
    got = kl_k3(torch.tensor([0.0, -1.0]), torch.tensor([0.6931472, -1.0]))
    assert got.tolist() == pytest.approx([0.3068528, 0.0], abs=1e-6)


def test_token_sum_weighs_rows_and_ignores_prompts():
    losses, mask = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert token_sum(losses, mask, torch.tensor([1.0, 0.5])).item() == 2 + 0.5 * 7
