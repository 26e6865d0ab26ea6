"""Each rank's share of a data set, in an order that every rank knows and that a resumed run goes on with.

The idea: the order of an epoch is a shuffle seeded by (seed + epoch), so no rank needs to tell another. All
ranks together take the next ``batch_size x N`` samples of it, rank r the r-th part of them:

    order:    | 7 2 | 9 0 | 5 3 | 1 8 | 4 6 |        N = 2 ranks, batch_size 2
    rank:     |  0  |  1  |  0  |  1  | ...

So what has been consumed is always the beginning of the order, whatever N is: a run that resumes on another
number of ranks neither repeats nor misses a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset


class ShardedDataLoader:
    """This rank's micro-batches. It is a place in an endless stream, not a fresh list each time.

    A ``for`` loop runs to the end of the epoch; the next one begins the next epoch, in another order. One that
    was left early (``break``), or that begins after ``load_checkpoint``, goes on where the last one stopped.

    Where the samples left at the end of an epoch do not fill a micro-batch on every rank, they are dealt out in
    one smaller micro-batch, filled up with samples from the beginning of the order so that all ranks get the
    same number (at most N - 1 samples are seen twice); with ``drop_last`` they are left out of this epoch.

    Args:
        dataset: has a length, and ``dataset[i]`` for i in 0 .. length-1; the same on every rank.
        batch_size: samples in a micro-batch of one rank.
        rank: this rank.
        world_size: number of ranks N.
        shuffle: otherwise every epoch is in the data set's own order.
        seed: of the shuffle, the same on every rank.
        drop_last: see above.
        collate_fn: makes a batch of a list of samples; by default torch's, which stacks tensors.
        **loader_args: further arguments of torch's DataLoader: num_workers, pin_memory, ...

    Attributes:
        epoch: the epoch that is running, or comes next.
        samples: samples of it that all ranks together have consumed.

    Raises:
        TypeError: the data set has no length.
        ValueError: it is too small for one micro-batch on every rank.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **loader_args: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise TypeError(
                f"{type(dataset).__name__} has no length, so it cannot be dealt out by index; give each rank its "
                "own part in a loader of your own, and pass training_data=None"
            )
        self.dataset, self.batch_size = dataset, batch_size
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._loader_args = {"collate_fn": collate_fn, **loader_args}
        self.epoch = self.samples = 0
        self._iteration = 0  # number of the loop under way; a loop of an earlier number is out of date
        if len(self) == 0:
            raise ValueError(
                f"a data set of {len(dataset)} samples gives no micro-batch of {batch_size} on each of "
                f"{world_size} ranks; make train_micro_batch_size_per_gpu smaller"
                + (", or dataloader_drop_last false" if drop_last and len(dataset) else "")
            )

    def __len__(self) -> int:
        """Micro-batches of one rank in a whole epoch."""
        full, left = divmod(len(self.dataset), self.batch_size * self.world_size)
        return full + (left > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        self._iteration += 1
        iteration = self._iteration
        # A generator of its own: torch's DataLoader would draw from the global one each time a loop begins, and
        # a resumed run, which begins one loop more, would see other dropout masks.
        own = torch.Generator().manual_seed(self.seed + self.epoch)
        loader = DataLoader(self.dataset, batch_sampler=self._indices(), generator=own, **self._loader_args)
        for batch in loader:
            if iteration != self._iteration:
                raise RuntimeError(
                    "this loop over the data loader is out of date: another one was begun, or the position was "
                    "set (load_checkpoint, set_epoch) since; begin a new one: `for batch in loader`"
                )
            self.samples = min(self.samples + self.batch_size * self.world_size, len(self.dataset))
            yield batch
        if iteration == self._iteration:
            self.epoch, self.samples = self.epoch + 1, 0

    def _indices(self) -> Iterator[list[int]]:
        """What this rank takes, micro-batch by micro-batch, from ``samples`` on."""
        total = len(self.dataset)
        order = torch.arange(total)
        if self.shuffle:
            order = torch.randperm(total, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        together = self.batch_size * self.world_size
        for start in range(self.samples, total, together):
            block = order[start : start + together].tolist()
            if len(block) < together and self.drop_last:
                return
            share = -(-len(block) // self.world_size)
            missing = share * self.world_size - len(block)
            block += [int(order[i % total]) for i in range(missing)]
            yield block[self.rank * share : (self.rank + 1) * share]

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; in the epoch that is running already, stay where we are."""
        if epoch != self.epoch:
            self.epoch, self.samples = epoch, 0
            self._iteration += 1

    def state_dict(self) -> dict[str, int]:
        """Where the stream is: the same on every rank, and of use on any number of ranks."""
        return {"epoch": self.epoch, "samples": self.samples, "seed": self.seed, "length": len(self.dataset)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a saved place, in the saved order (``seed`` is the saved one).

        Raises:
            ValueError: the place is in a data set of another length.
        """
        if state["length"] != len(self.dataset):
            raise ValueError(
                f"the saved place is in a data set of {state['length']} samples, this one has {len(self.dataset)}"
            )
        self.epoch, self.samples, self.seed = state["epoch"], state["samples"], state["seed"]
        self._iteration += 1
