"""Numbers worked out by hand.

One task, four episodes. Rewards 1, 0.5, 0 and one not scored. Act rows: 1, 2, 3. Rehearse rows: 2, 1, none.
"""

import pytest
import torch

from envace.algorithms.advantages import group_advantages
from envace.algorithms.losses import kl_exact, kl_k3, policy_loss, sequence_log_ratio, token_sum
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


def test_a_response_is_compared_with_others_to_the_same_call():
    # Every episode asks one call (prompt 7) and gets the same answer; acting fails in two, and the third asks on (prompt 8).
    first, second = generation(Role.REHEARSE, 7), generation(Role.REHEARSE, 8)
    made = group(
        *(
            episode(index, reward, 1, 0).model_copy(update={"generations": (generation(Role.ACT, index), *answers)})
            for index, reward, answers in ((0, 0.0, (first,)), (1, 0.0, (first,)), (2, 1.0, (first, second)))
        )
    )
    by_call = advantages(made, scope="call")
    # Prompt 7: mean 1/3, so the one answer is pushed nowhere: -1/3 - 1/3 + 2/3 = 0. Prompt 8 has nothing to compare with.
    assert by_call["rehearse"] == pytest.approx([-1 / 3, -1 / 3, 2 / 3, 0])
    assert by_call["act"] == pytest.approx([-1 / 3, -1 / 3, 2 / 3])
    # By role the mean is (0 + 0 + 1 + 1) / 4: the same answer, right or wrong, is pushed down by -0.5 in all.
    assert advantages(made)["rehearse"] == pytest.approx([-0.5, -0.5, 0.5, 0.5])


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
    # Over episodes, 1 and 0.5: mean 0.75, deviation 0.25. Leave one out, Act: deviation of 1, 0.5, 0 is sqrt(1/6).
    assert advantages(UNEVEN, normalize_std=True, baseline="episode")["rehearse"] == pytest.approx([1, 1, -1])
    left_out = advantages(UNEVEN, normalize_std=True, baseline="leave_one_out")["act"]
    assert left_out == pytest.approx([1.8371173, 0, 0, -1.8371173, -1.8371173, -1.8371173])


def test_a_singleton_has_nothing_to_be_compared_with():
    lone = group(episode(0, 1.0, 1, 2), episode(1, 0.0, 1, 0))
    for baseline in ("row", "episode", "leave_one_out"):
        assert advantages(lone, baseline=baseline)["rehearse"] == [0, 0]
    assert advantages(lone)["act"] == [0.5, -0.5]


def test_a_singletons_raw_reward_on_request():
    # The released rule: a mean over one value is 0. Two rows of one episode are two values to a mean over rows.
    one, two = group(episode(0, 0.8, 1, 1), episode(1, 0.0, 1, 0)), group(episode(0, 0.8, 1, 2), episode(1, 0.0, 1, 0))
    assert advantages(one, singleton="reward")["rehearse"] == [0.8]
    assert advantages(two, singleton="reward")["rehearse"] == [0, 0]
    for baseline in ("episode", "leave_one_out"):
        assert advantages(two, singleton="reward", baseline=baseline)["rehearse"] == [0.8, 0.8]
        assert advantages(one, singleton="reward", baseline=baseline)["act"] != [0.8, 0]
    # A not-scored episode's rows are no company.
    left = group(episode(0, 0.8, 1, 0), episode(1, None, 3, 0))
    assert advantages(left) == {"act": [0], "rehearse": []}
    assert advantages(left, singleton="reward")["act"] == [0.8]


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


def test_an_anchored_role_keeps_its_rows_of_groups_that_are_dropped():
    flat = group(episode(0, 0.5, 1, 2), episode(1, 0.5, 1, 1))
    settings = AlgorithmSettings(drop_no_variance=True, rehearse_kl=0.3)
    rows, metrics = build_rows([UNEVEN, flat], settings)
    anchors = [row for row in rows if row.objective == "anchor"]
    assert {(row.role, row.kl) for row in anchors} == {("rehearse", 0.3)}
    assert len(anchors) == 3 and len(rows) == 9 + 3
    # The metric is over what the policy loss has.
    assert metrics["advantage_abs_mean"] == build_rows([UNEVEN], settings)[1]["advantage_abs_mean"]


def test_groups_of_different_tasks_do_not_share_a_baseline():
    got = advantages(
        [group(episode(0, 1.0, 1, 0), episode(1, 0.0, 1, 0)), group(episode(0, 0.2, 1, 0), episode(1, 0.0, 1, 0))]
    )
    assert got["act"] == pytest.approx([0.5, -0.5, 0.1, -0.1])


def test_a_frozen_role_gives_no_rows_and_a_role_weight_is_carried():
    rows, _ = build_rows([UNEVEN], AlgorithmSettings(freeze=("act",), rehearse_weight=0.25))
    assert {row.role for row in rows} == {"rehearse"}
    assert {row.weight for row in rows} == {0.25}


def test_each_role_has_its_own_kl():
    rows, _ = build_rows([UNEVEN], AlgorithmSettings(act_kl=0.1, rehearse_kl=0.5))
    assert {(row.role, row.kl) for row in rows} == {("act", 0.1), ("rehearse", 0.5)}


def test_a_frozen_role_counts_in_a_joint_baseline():
    # As in test_one_baseline_for_both_roles, and the metric is over what is trained: (0.5 + 0.5 + 0) / 3.
    rows, metrics = build_rows([UNEVEN], AlgorithmSettings(freeze=("act",), scope="joint"))
    assert [row.advantages[-1] for row in rows] == pytest.approx([0.5, 0.5, 0])
    assert metrics["advantage_abs_mean"] == pytest.approx(1 / 3)


def test_equal_generations_of_different_episodes_keep_their_own_advantage():
    same = generation(Role.ACT, 7)
    first, second = (
        episode(index, reward, 0, 0).model_copy(update={"generations": (same,)})
        for index, reward in ((0, 1.0), (0, 0.0))
    )
    assert advantages(group(first, second))["act"] == [0.5, -0.5]
    assert advantages(group(first, second), baseline="leave_one_out")["act"] == [1, -1]


def test_the_roles_of_an_episode_merge_apart_though_they_alternate():
    def drawn(role: Role, prompt: tuple[int, ...], completion: tuple[int, ...]) -> Generation:
        return Generation(
            role=role, turn=0, prompt_ids=prompt, completion_ids=completion, logprobs=(-1.0,) * len(completion),
            stop_reason="stop",
        )  # fmt: skip

    made = (
        drawn(Role.ACT, (1,), (2,)),
        drawn(Role.REHEARSE, (7,), (8,)),
        drawn(Role.ACT, (1, 2, 3), (4,)),
        drawn(Role.REHEARSE, (7, 8, 9), (5, 6)),
    )
    best = episode(0, 1.0, 0, 0).model_copy(update={"generations": made})
    # Act rows: 1, 1, 0 -> mean 2/3. Rehearse: one episode -> 0.
    rows, _ = build_rows([group(best, episode(1, 0.0, 1, 0))], AlgorithmSettings())
    assert [(row.role, row.ids, row.mask) for row in rows[:2]] == [
        ("act", (1, 2, 3, 4), (0, 1, 0, 1)),
        ("rehearse", (7, 8, 9, 5, 6), (0, 1, 0, 1, 1)),
    ]
    assert rows[0].advantages == pytest.approx((0, 1 / 3, 0, 1 / 3))


def test_generations_of_different_temperature_do_not_merge():
    warm = Generation(
        role="act", turn=0, prompt_ids=(1,), completion_ids=(2,), logprobs=(-1.0,), stop_reason="stop", temperature=0.5
    )
    cold = warm.model_copy(update={"prompt_ids": (1, 2), "completion_ids": (3,), "temperature": 1.0})
    made = episode(0, 1.0, 0, 0).model_copy(update={"generations": (warm, cold)})
    rows, _ = build_rows([group(made)], AlgorithmSettings())
    assert [row.temperature for row in rows] == [0.5, 1.0]


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


def test_sequence_ratio_by_hand():
    # Two merged generations of log-ratios (0.3, 0.1) and (-0.4): means 0.2 and -0.4; nothing at unsampled tokens.
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    old = torch.full((2, 5), -2.0)
    now = (old + torch.tensor([[9.0, 0.3, 0.1, 9.0, -0.4], [0.5, 9.0, 9.0, 9.0, 9.0]])).requires_grad_()
    got = sequence_log_ratio(now, old, mask)
    assert got.flatten().tolist() == pytest.approx([0, 0.2, 0.2, 0, -0.4, 0.5, 0, 0, 0, 0], abs=1e-6)
    # Unclipped, A = 1: d/dlogprob of -exp(s) summed over the n tokens is -exp(s) at each; the second, 0.67 < 0.8 with a
    # gain, is not clipped; the last, exp(0.5) > 1.2, is: no gradient.
    losses = policy_loss(old + got, old, torch.ones(2, 5), 0.2, 0.25)
    token_sum(losses, mask, torch.ones(2)).backward()
    gained = [0, -1.2214028, -1.2214028, 0, -0.6703200, 0, 0, 0, 0, 0]
    assert now.grad.flatten().tolist() == pytest.approx(gained, abs=1e-6)


def test_kl_k3_by_hand():
    # d = ln 2 - 0: 2 - ln 2 - 1 = 0.306853; no difference: 0.
    got = kl_k3(torch.tensor([0.0, -1.0]), torch.tensor([0.6931472, -1.0]))
    assert got.tolist() == pytest.approx([0.3068528, 0.0], abs=1e-6)


def test_kl_exact_by_hand():
    # p = (1/2, 1/2) and q = (1/4, 3/4): ln(2) / 2 + ln(2/3) / 2 = 0.143841; against itself 0.
    half, other = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    got = kl_exact(half.expand(2, 2), torch.stack([other, half]))
    assert got.tolist() == pytest.approx([0.1438410, 0.0], abs=1e-6)


def test_token_sum_weighs_rows_and_ignores_prompts():
    losses, mask = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert token_sum(losses, mask, torch.tensor([1.0, 0.5])).item() == 2 + 0.5 * 7
