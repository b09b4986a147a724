"""Muon and AdamW as one optimizer: who gets which parameter, and going on from a saved state."""

import copy

import pytest
import torch

from envace.engines.local.optimizers import make_optimizer
from tests.engines.models import build


def stepped(model, optimizer, steps):
    for seed in steps:
        torch.manual_seed(seed)
        model(input_ids=torch.randint(0, 97, (2, 9)), labels=torch.randint(0, 97, (2, 9))).loss.backward()
        optimizer.step(0.01)
        optimizer.zero_grad()


def test_adamw_is_torchs_own():
    ours, theirs = build("llama"), build("llama")
    stepped(ours, make_optimizer(ours, "adamw", (0.9, 0.98), 0.1), (1, 2))
    expected = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.9, 0.98), weight_decay=0.1)
    for seed in (1, 2):
        torch.manual_seed(seed)
        theirs(input_ids=torch.randint(0, 97, (2, 9)), labels=torch.randint(0, 97, (2, 9))).loss.backward()
        expected.step()
        expected.zero_grad()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_muon_moves_hidden_matrices_along_orthogonal_directions_and_nothing_else():
    model = build("qwen3")
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    stepped(model, make_optimizer(model, "muon", (0.9, 0.98), 0.0), (1,))
    for name, value in model.named_parameters():
        moved = (value.detach() - before[name]) / 0.01
        if value.ndim == 2 and "embed" not in name and "lm_head" not in name:
            # Its singular values are near one, times 0.2 sqrt(larger side): the root mean square of an AdamW step.
            scale = 0.2 * max(value.shape) ** 0.5
            singular = torch.linalg.svdvals(moved) / scale
            assert 0.6 < float(singular.max()) < 1.3
        else:
            # AdamW's first step is the sign of the gradient wherever there is one.
            assert torch.allclose(moved[moved.abs() > 0.01].abs(), torch.tensor(1.0), atol=0.05)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_saved_state_goes_on_bit_for_bit(name):
    model = build("qwen3")
    optimizer = make_optimizer(model, name, (0.9, 0.98), 0.0)
    stepped(model, optimizer, (1, 2))
    twin = build("qwen3")
    twin.load_state_dict(model.state_dict())
    other = make_optimizer(twin, name, (0.9, 0.98), 0.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # as from a file
    stepped(model, optimizer, (3,))
    stepped(twin, other, (3,))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), twin.parameters(), strict=True))
