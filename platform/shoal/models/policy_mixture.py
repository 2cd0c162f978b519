"""A mixture of policies: of each episode, one member acts from its beginning to its end.

Called by an endpoint, through a version that a run of self-play has registered with `action=average`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal.registry.manifest import ModelFactory


class PolicyMixture(nn.Module):
    """`num_members` policies of one `network` (a factory's fields), all equally likely.

    By Kuhn's theorem, to draw a member for each episode is as good as the average of the members' behaviour weighted by
    how likely each leads to an observation, which no function of the observation alone could compute. The state of an
    episode is its member's number, from 1 on, and then the member's own state.
    """

    def __init__(self, network: Mapping[str, Any], num_members: int) -> None:
        super().__init__()
        factory = ModelFactory.parse(dict(network))
        self.members = nn.ModuleList([cast("nn.Module", factory.build()) for _ in range(num_members)])

    def predict(self, observation: Tensor, state: Tensor, action_mask: Tensor | None = None) -> dict[str, Tensor]:
        """What the members answer to observation [B, *obs], and next_state [B, 1 + S]. Where the first number of state
        [B, 1 + S] is 0, a member is drawn."""
        drawn = torch.randint(1, len(self.members) + 1, (len(state),), device=state.device)
        given = state[:, 0].round().long().clamp(0, len(self.members))
        chosen = torch.where(given > 0, given, drawn)
        answers = dict[str, Tensor]()
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().squeeze(-1)
            inputs = {"observation": observation[rows]}
            if state.shape[1] > 1:
                inputs["state"] = state[rows, 1:]
            if action_mask is not None:
                inputs["action_mask"] = action_mask[rows]
            member: Any = self.members[number - 1]
            for name, each in member.predict(**inputs).items():
                answers.setdefault(name, each.new_empty(len(state), *each.shape[1:]))[rows] = each
        own_state = answers.pop("next_state", state[:, 1:])
        return {**answers, "next_state": torch.cat([chosen.unsqueeze(-1).to(state.dtype), own_state], -1)}
