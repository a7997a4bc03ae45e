"""A store as PyTorch training data: a data set, batches of a token budget, and a loader of packed batches.

dataset = HiddenStateDataset("/data/kimi-store")
sampler = TokenBudgetSampler(dataset.lengths, tokens=16_384, seed=0, rank=rank, world_size=world_size)
for epoch in range(3):
    for batch in make_loader(dataset, sampler, workers=4):
        ...                                   # batch["input_ids"] [T], batch["states"]["layer2"] [T, H], ...
"""

from hsdump.torch.batches import TokenBudgetSampler
from hsdump.torch.dataset import HiddenStateDataset, Packer, make_loader

__all__ = ["HiddenStateDataset", "Packer", "TokenBudgetSampler", "make_loader"]
