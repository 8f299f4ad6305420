"""A penalty and a schedule of dropout for isoreg, as a package of their own."""

from torch import nn


class LengthPenalty(nn.Module):
    "Pull the length of the token vectors of one layer to a target."

    def __init__(self, lam: float = 0.1, layer: int = -1, target: float = 1.0):
        super().__init__()
        self.lam, self.layer, self.target, self.parts = lam, layer, target, {}

    def forward(self, hidden_states, attention_mask=None):
        length = hidden_states[self.layer].norm(dim=-1)  # (batch, length)
        kept = length if attention_mask is None else length[attention_mask.bool()]
        term = self.lam * (kept - self.target).square().mean()
        self.parts = {"length": kept.mean().detach()}  # logged beside the loss
        return term


def rising(sites, p_max: float = 0.1, bend: float = 1.0) -> dict[str, float]:
    "Return a rate for each site, from 0 at the first to p_max at the last."
    return {s.name: p_max * (i / max(1, len(sites) - 1)) ** bend for i, s in enumerate(sites)}
