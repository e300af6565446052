"""Indices of the sealed keys of each row, in host memory, kept in step with the pages.

A row's index is a function of its pages and nothing else: whatever happened before (chunks of a prompt, a draft taken
back, sequences reordered), the same pages give the same index. So keys enter by page, cells are trained on the first
256, 512, 1024, … tokens whenever there are that many, and a row whose pages are no longer those that were indexed begins
anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import faiss
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvengine.kernels.page_scores import top_units

LEAST = 256
"""Tokens from which on a row is not searched exactly."""
LINKS = 32
"""Neighbours of a key in the graph."""
BUILD = 80
"""Keys in view while the graph is built."""
VIEW = 64
"""Keys in view while it is walked, times `probe`."""


class Row:
    """The keys of one row's pages, in order, one page after the other, whatever columns of the table lie between."""

    def __init__(self, kind: str, probe: int) -> None:
        self.kind, self.probe = kind, probe
        self.stamps = np.zeros(0, dtype=np.int64)  # of the pages that are in it
        self.columns = np.zeros(0, dtype=np.int64)  # of the table, where these pages are now
        self.flat: Any = None  # keys as they are
        self.fast: Any = None
        self.trained = 0
        self.centre: Any = 0.0
        self.means: Any = None  # of the cells: keys whose directions are alike, of whatever length

    @property
    def tokens(self) -> int:
        return 0 if self.flat is None else int(self.flat.ntotal)

    @property
    def dim(self) -> int:
        return 0 if self.flat is None else int(self.flat.d)

    def __deepcopy__(self, memo: dict[int, Any]) -> Row:
        twin = copy.copy(self)
        twin.flat = None if self.flat is None else faiss.clone_index(self.flat)
        twin.fast = None if self.fast is None else faiss.clone_index(self.fast)
        return twin

    def begins(self, stamps: np.ndarray) -> bool:
        """Whether these pages begin with those that are in it."""
        return np.array_equal(self.stamps, stamps[: len(self.stamps)])

    def add(self, stamps: np.ndarray, keys: np.ndarray) -> None:
        """Pages with these stamps, and their keys [page, token, dim]: what adding them one by one gives."""
        if not len(stamps):
            return
        had = self.tokens
        self.flat = faiss.IndexFlatIP(keys.shape[2]) if self.flat is None else self.flat
        self.flat.add(keys.reshape(-1, keys.shape[2]))
        self.stamps = np.concatenate([self.stamps, stamps])
        if self.kind != "flat" and self.tokens >= LEAST:
            self.index(had, keys)

    def index(self, had: int, pages: np.ndarray) -> None:
        """Pages that came behind `had` tokens. Of several numbers at which cells are due, those of the last are made."""
        due = 1 << (self.tokens.bit_length() - 1)
        if self.fast is None or (self.kind == "ivf" and due >= 2 * self.trained):
            first = -(-((due if self.kind == "ivf" else LEAST) - had) // pages.shape[1])
            self.begin(had + first * pages.shape[1])
            pages = pages[first:]
        for page in pages:
            self.fast.add(page - self.centre)

    def begin(self, tokens: int) -> None:
        """A new index of the first `tokens`, its cells those of the largest power of two among them."""
        keys, due = self.flat.reconstruct_n(0, tokens), 1 << (tokens.bit_length() - 1)
        self.centre, self.trained = keys[:due].mean(0), due
        if self.kind == "hnsw":
            self.fast = faiss.IndexHNSWFlat(self.dim, LINKS, faiss.METRIC_INNER_PRODUCT)
            self.fast.hnsw.efConstruction = BUILD
        else:
            cells = int(4 * due**0.5)
            self.fast = faiss.IndexIVFFlat(faiss.IndexFlatIP(self.dim), self.dim, cells, faiss.METRIC_INNER_PRODUCT)
            self.fast.cp.min_points_per_centroid = 1
            self.fast.train(keys[:due] - self.centre)
            self.means = faiss.IndexFlatIP(self.dim)
            self.means.add(means_of(self.fast.quantizer, keys[:due] - self.centre))
        self.fast.add(keys - self.centre)

    def search(self, queries: np.ndarray, count: int, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slots [query, candidate], -1 for none, and their logits less one constant per query."""
        if not self.tokens:
            return np.zeros((len(queries), 0), dtype=np.int64), np.zeros((len(queries), 0), dtype=np.float32)
        page = self.tokens // len(self.stamps)
        some, alive = None, alive.reshape(-1, page)[self.columns].ravel()
        if self.fast is not None and not alive.all():
            some = faiss.IDSelectorBitmap(np.packbits(alive, bitorder="little"))
        if self.fast is None:
            logits, ids = self.look_at_all(queries, count, alive)
        elif self.kind == "ivf":
            logits, ids = self.search_cells(queries, count, some)
        else:
            params = faiss.SearchParametersHNSW(sel=some, efSearch=VIEW * self.probe)
            logits, ids = self.fast.search(queries, count, params=params)
        return np.where(ids < 0, -1, self.columns[ids // page] * page + ids % page), logits

    def look_at_all(self, queries: np.ndarray, count: int, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The best logits and ids, of equal ones the earlier, with keys read once: faiss reads them for each of a few queries."""
        keys = torch.from_numpy(faiss.rev_swig_ptr(self.flat.get_xb(), self.tokens * self.dim)).view(-1, self.dim)
        logits = (keys @ torch.as_tensor(queries, dtype=torch.float32).T).T
        ids = top_units(logits, count, alive=torch.from_numpy(alive).expand(logits.shape))
        found = logits.gather(1, ids.clamp(min=0)).masked_fill_(ids < 0, -torch.inf)
        found, order = found.sort(stable=True, dim=1, descending=True)
        return found.numpy(), ids.gather(1, order).numpy()

    def search_cells(self, queries: np.ndarray, count: int, some: Any) -> tuple[np.ndarray, np.ndarray]:
        """Logits and ids of what is best in the cells whose means match a query best; `some`: who may be found."""
        params = faiss.SearchParametersIVF(sel=some, nprobe=min(self.probe, self.fast.nlist))
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        near, cells = self.means.search(queries, params.nprobe)
        logits, ids = np.empty((len(queries), count), np.float32), np.empty((len(queries), count), np.int64)
        where = (faiss.swig_ptr(x) for x in (cells, near, logits, ids))
        self.fast.search_preassigned_c(len(queries), faiss.swig_ptr(queries), count, *where, False, params)
        return logits, ids

    @property
    def nbytes(self) -> int:
        held = self.tokens * self.dim * 4
        if self.fast is None:
            return held
        held += self.fast.ntotal * self.dim * 4
        if self.kind == "ivf":
            return held + self.fast.ntotal * 8 + 2 * self.fast.nlist * self.dim * 4
        graph = self.fast.hnsw
        return held + graph.neighbors.size() * 4 + graph.offsets.size() * 8 + graph.levels.size() * 4

    @property
    def reads(self) -> int:
        """Bytes that a search looks at; of a graph, at the least."""
        size = self.tokens * self.dim * 4
        if self.fast is None:
            return size
        if self.kind == "ivf":
            return self.fast.nlist * self.dim * 4 + size * min(self.probe, self.fast.nlist) // self.fast.nlist
        return min(size, VIEW * self.probe * (self.dim + 2 * LINKS) * 4)


def means_of(cells: Any, keys: Float[np.ndarray, "token dim"]) -> Float[np.ndarray, "cell dim"]:
    """The mean key of each cell; of one without any, its direction.

    By these a query chooses cells, not by their directions alone: where a channel is much louder than the others, the longest
    keys are the most alike, and a direction a little off theirs would often match the query better.
    """
    found, which = cells.reconstruct_n(0, cells.ntotal), cells.search(keys, 1)[1][:, 0]
    count = np.bincount(which, minlength=len(found))
    total = np.zeros_like(found)
    np.add.at(total, which, keys)
    return np.where(count[:, None] > 0, total / np.maximum(count, 1)[:, None].astype(total.dtype), found)


class Rows:
    """The indices of all rows of a lane."""

    def __init__(self, kind: str, probe: int) -> None:
        self.kind, self.probe = kind, probe
        self.rows: list[Row] = []

    def update(
        self, stamps: Int[np.ndarray, "row column"], keys: Callable[[slice], Float[Tensor, "row token dim"]]
    ) -> None:
        """Make the rows those of these pages (stamp -1: none); `keys` reads those of some columns."""
        there = [np.nonzero(mine >= 0)[0] for mine in stamps]  # a row may lack pages that others have
        mine = [row[at] for row, at in zip(stamps, there, strict=True)]
        known = self.rows if len(self.rows) == len(stamps) else [None] * len(stamps)
        self.rows = [
            row if row is not None and row.begins(own) else Row(self.kind, self.probe)
            for row, own in zip(known, mine, strict=True)
        ]
        missing = [at[len(row.stamps) :] for row, at in zip(self.rows, there, strict=True)]
        for row, at in zip(self.rows, there, strict=True):
            row.columns = at
        wanted = np.concatenate(missing) if missing else np.zeros(0, dtype=np.int64)
        if not len(wanted):
            return
        first, last = int(wanted.min()), int(wanted.max()) + 1
        new = keys(slice(first, last)).detach().float().cpu().numpy()
        pages = new.reshape(len(stamps), last - first, -1, new.shape[-1])
        for i, (row, at) in enumerate(zip(self.rows, missing, strict=True)):
            row.add(stamps[i, at], pages[i, at - first])

    def search(self, row: int, queries: np.ndarray, count: int, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.rows[row].search(queries, count, alive)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def reads(self) -> int:
        return sum(row.reads for row in self.rows)
