"""Launches made again for the next token, which differ from those before in a few tensors and numbers.

Between a step's launches stand a hundred small things that lead to the same arguments for every token: shapes and strides are
checked, grids divided, memory is taken, what was compiled is looked up. Here launches are noted as they are made, once, and then
made again with other tensors in the places of those that were named, and nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from triton.runtime.driver import driver

from kvengine.kernels.dispatch import elsewhere
from kvengine.kernels.gpu import Note, Notes
from kvengine.kernels.gpu.again import start, watched, whole

ALIGNED = 16
"""Bytes, at whose multiples tensors have to begin: Triton compiles anew for those that do not."""
APART = 256
"""Bytes, at whose multiples memory of one launch begins beside that of others."""


class Launches:
    """Launches as they were noted.

    Args:
        notes: what was launched.
        given: tensors that are others at each time.
        own: tensors that only these launches read and write, taken anew at each time.
        numbers: (which launch, name of its argument, which of the numbers that are given each time stands there).
        most: how many elements some of their own tensors have at most, by id, where these grow.
        late: tensors that are others at each time too, and are not there before those launches that come before their use.
    """

    def __init__(
        self, notes: list[Note], given: Sequence[Tensor], own: Sequence[Tensor], numbers: Sequence[tuple[int, str, int]],
        most: Mapping[int, int], late: Sequence[Tensor],
    ) -> None:  # fmt: skip
        self.late, self.pause, given = [0] * len(late), len(notes), [*given, *late]
        self.device = given[0].device
        self.own: list[tuple[torch.dtype, Sequence[int], Sequence[int]]] = [
            (x.dtype, (most[id(x)],), (1,)) if id(x) in most else (x.dtype, x.shape, x.stride()) for x in own
        ]
        sizes = [x.itemsize * most[id(x)] if id(x) in most else x.untyped_storage().nbytes() for x in own]
        sizes = [-(-size // APART) * APART for size in sizes]
        *self.offsets, self.size = accumulate(sizes, initial=0)
        others = {id(x): i for i, x in enumerate(given)}
        mine = {x.data_ptr(): i for i, x in enumerate(own, len(given)) if x.numel()}
        self.notes: list[Note] = []  # what comes and goes is not kept
        self.places: list[list[tuple[int, int]]] = []
        addresses: list[list[Any]] = []
        for note in notes:
            kept, lies, places = list(note.given), list(note.given), list[tuple[int, int]]()
            for i, x in enumerate(note.given):
                if isinstance(x, Tensor):
                    lies[i] = x.data_ptr()
                    if (j := others.get(id(x), mine.get(lies[i]))) is not None:
                        kept[i] = None
                        places.append((i, j))
            if any(len(given) - len(late) <= j < len(given) for _, j in places):
                self.pause = min(self.pause, len(self.notes))
            self.notes.append(note._replace(given=tuple(kept)))
            self.places.append(places)
            addresses.append(lies)
        for number, name, j in numbers:
            self.places[number].append((notes[number].kernel.arg_names.index(name), len(given) + len(own) + j))
        self.ready = [
            (note.ready, whole(note.grid), lies, places)
            for note, lies, places in zip(notes, addresses, self.places, strict=True) if note.ready is not None
        ]  # fmt: skip
        self.ready = self.ready if len(self.ready) == len(notes) else []

    def again(
        self, given: Sequence[Tensor], numbers: Sequence[int], late: Callable[[], Sequence[Tensor]] | None = None
    ) -> bool:
        """Make them with these tensors and numbers, and what `late` gives. Whether that could be: if not, nothing was done."""
        values = [x.data_ptr() for x in given]
        if any([x % ALIGNED for x in values]) or elsewhere(self.device):
            return False
        room = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        if not self.ready or watched():
            self.plainly(given if late is None else [*given, *late()], room, numbers)
            return True
        base, stream = room.data_ptr(), driver.active.get_current_stream(self.device.index)
        values += self.late
        values += [base + offset for offset in self.offsets]
        values += numbers
        for number, (ready, grid, arguments, places) in enumerate(self.ready):
            if number == self.pause and late is not None:
                # Kept until all is launched: what another stream has filled would be given away before it is read.
                here = late()
                values[len(given) : len(given) + len(here)] = [x.data_ptr() for x in here]
            for i, j in places:
                arguments[i] = values[j]
            start(ready, grid, stream, arguments)
        return True

    def plainly(self, given: Sequence[Tensor], room: Tensor, numbers: Sequence[int]) -> None:
        """The same as Triton launches it, from tensors."""
        values: list[Any] = list(given)
        for (dtype, shape, stride), first, end in zip(
            self.own, self.offsets, [*self.offsets[1:], self.size], strict=True
        ):
            values.append(room[first:end].view(dtype).as_strided(shape, stride))
        values += numbers
        for note, places in zip(self.notes, self.places, strict=True):
            arguments = list(note.given)
            for i, j in places:
                arguments[i] = values[j]
            note.kernel[note.grid](*arguments, **note.named)


def remembered(
    notes: Notes,
    given: Sequence[Tensor],
    held: Sequence[Tensor],
    numbers: Sequence[tuple[int, str, int]],
    most: Mapping[int, int] | None = None,
    late: Sequence[Tensor] = (),
) -> Launches | None:
    """These launches, if nothing went in but `given` and `late` tensors, their own scratch, and `held` tensors (which stay where
    they are) or views of the last, and if they are to be found again. `most`, `late`: see `Launches`."""
    known = {id(x) for x in (*given, *late)}
    own = [x for x in notes.own if id(x) not in known]
    mine, kept = {x.data_ptr() for x in own if x.numel()}, {x.untyped_storage().data_ptr() for x in held}
    for note in notes:
        for x in note.given:
            if isinstance(x, Tensor) and id(x) not in known and x.data_ptr() not in mine:
                if x.untyped_storage().data_ptr() not in kept:
                    return None
    if any(x.data_ptr() % ALIGNED for x in (*given, *late, *own)) or elsewhere(given[0].device):
        return None
    return Launches(notes, given, own, numbers, most or {}, late)
