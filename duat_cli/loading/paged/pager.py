"""The weights of a model, of which one page at a time is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from duat_cli.compat.transformers import load_part
from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.parts import ROWS_BYTES
from duat_cli.loading.paged.layout import Page, own_tensors, tied
from duat_cli.loading.paged.recorder import Step, again
from duat_cli.text import listed

Place = tuple[nn.Module, str]  # a module and the name of its parameter or buffer
See = Callable[[str, Tensor], Sequence["Look"]]  # parameter or buffer, a tensor of its shape and dtype
Load = Callable[[Any, Mapping[str, Tensor], torch.dtype, str], None]  # puts tensors in their places in a model


class Look(Protocol):
    """An examination of the values of a parameter or buffer, which come in pieces."""

    def add(self, piece: Tensor) -> None: ...

    def done(self) -> None: ...


class Source(Protocol):
    """The source that tensors are read from."""

    bytes_read: int

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]: ...

    def rows(self, name: str, rows: Sequence[int]) -> Tensor: ...


class Pager:
    """Reads pages as they are asked for, and the next page meanwhile.

    A door whose page is missing calls `at_door`. By default that holds the page; a scheduler that knows better which
    page is needed next replaces it. see: called with every tensor once, when it is first read.
    """

    def __init__(
        self,
        model: Any,
        pages: Sequence[Page],
        reader: Source,
        *,
        dtype: torch.dtype,
        device: str,
        see: See,
        zero: Sequence[str] = (),
        steps: Mapping[str, Sequence[Step]] = MappingProxyType({}),
        load: Load = load_part,
        ahead: bool = True,
    ) -> None:
        """zero: parameters that the files lack. steps: changes of parameters and buffers after they are read. load:
        puts a page's tensors into the model. ahead: whether the next block is read meanwhile."""
        self._model, self._reader, self._dtype, self._device, self._see = model, reader, dtype, device, see
        self._load, self._steps, self._reads_ahead = load, steps, ahead
        self.at_door: Callable[[Page], None] = self.hold
        self.turning: Callable[[Page], None] = lambda _page: None  # called before another page is held
        self.freed: Callable[[str], None] = lambda _device: None  # called with the device once a page has left it
        self.held: Page | None = None
        self.pages = tuple(pages)
        self._order = {page: place for place, page in enumerate(pages)}
        self._names = {
            (m, n): f"{path}.{n}".lstrip(".") for path, m in model.named_modules() for n, _ in own_tensors(m)
        }
        at = {name: place for place, name in self._names.items()}
        self._ties = [[at[name] for name in group if name in at] for group in tied(model)]
        self._unread = {name for (m, n), name in self._names.items() if getattr(m, n).is_meta}
        self._filled: list[tuple[Place, Tensor]] = []  # tensors that the page's replaced
        self._meta: dict[Place, Tensor] = {}  # tensors that stand-ins replaced
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="duat-read")
        self._ahead: tuple[Page, Future[dict[str, Tensor]]] | None = None
        for name in zero:
            module, own = at[name]
            setattr(module, own, nn.Parameter(torch.zeros_like(getattr(module, own), device=device)))
            self._show({at[name]}, [getattr(module, own)])
        self._put(pages[0])
        inside = {place for page in pages for door in page.doors for place in _places(door)}
        self._require({place for place in self._names if place not in inside})
        for page in pages[1:]:
            if isinstance(page.doors[0], nn.Embedding):
                self._stand_in(page)
            for door in page.doors:
                guard(self, page, door)

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def hold(self, page: Page) -> None:
        """Brings this page into memory, and drops every other except the frame."""
        if self.held is page:
            return
        before = self.held
        self._turn_to(page)
        step = -1 if before is not None and self._order[before] > self._order[page] else 1
        following = next((p for p, place in self._order.items() if place == self._order[page] + step), None)
        if self._reads_ahead and following is not None and following.block:
            self._ahead = following, self._thread.submit(self._reader.tensors, following.tensors)

    def _turn_to(self, page: Page) -> None:
        self.turning(page)
        self.release()
        self._filled = self._put(page)
        self.held = page

    def bring(self, module: nn.Module) -> None:
        """Asks for the page that a module lies in, as its door does when it is about to run."""
        page = next((p for p in self._order if any(module in set(door.modules()) for door in p.doors)), None)
        if page is not None and self.held is not page:
            self.at_door(page)

    def depth(self, page: Page) -> int:
        """Number of blocks in front of that page."""
        return sum(other.block and place < self._order[page] for other, place in self._order.items())

    def release(self) -> None:
        """Drops every page except the frame."""
        for place, value in self._filled:
            _set(place, value)
        self._filled, self.held = [], None
        self.freed(self._device)

    def rows(self, page: Page, rows: Sequence[int]) -> Tensor:
        """Some rows of a page's matrix, (rows, width)."""
        return self._reader.rows(page.tensors[0], rows).to(self._device, self._dtype)

    def complete(self) -> None:
        """Reads what no pass has asked for, so that every tensor has been seen. Nothing is read ahead, because the next
        page usually has been read."""
        for page in self._order:
            unread = {place for door in page.doors for place in _places(door) if self._names[place] in self._unread}
            if unread and page.by_rows:
                self._show(unread, self._in_pieces(page, _get(next(iter(unread)))))
            elif unread:
                self._turn_to(page)
        self.release()

    def _in_pieces(self, page: Page, like: Tensor) -> Iterator[Tensor]:
        """All rows of a matrix, some at a time. like: a tensor of its shape."""
        height, width = like.shape
        step = max(1, ROWS_BYTES // (width * self._dtype.itemsize))
        for start in range(0, height, step):
            yield self.rows(page, range(start, min(start + step, height)))

    def within(self, part: nn.Module, found: Mapping[str, bytes]) -> dict[str, bytes]:
        """The findings for the parameters and buffers of a part of the model, under their names in it. A tied tensor
        counts under its first name in the part."""
        outside = next(path for path, module in self._model.named_modules() if module is part)
        prefix = f"{outside}." if outside else ""
        every = dict(found)
        for names in ([self._names[place] for place in group] for group in self._ties):
            held = next((name for name in names if name in found), None)
            inside = [name for name in names if name.startswith(prefix)]
            if held is not None and held not in inside and inside:
                every[inside[0]] = found[held]
        return {name.removeprefix(prefix): value for name, value in every.items() if name.startswith(prefix)}

    def close(self) -> None:
        """Stops reading."""
        self._thread.shutdown(cancel_futures=True)

    def _fetched(self, page: Page) -> dict[str, Tensor]:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            found = ahead[1].result()  # waited for even if unused
            if ahead[0] is page:
                return found
        return self._reader.tensors(page.tensors)

    def _put(self, page: Page) -> list[tuple[Place, Tensor]]:
        """Fills the places of a page; returns the tensors that were there."""
        stood = [(place, _get(place)) for module in page.doors or (self._model,) for place in _places(module)]
        for place, _ in stood:
            if place in self._meta:
                _set(place, self._meta[place])
        empty = [place for place, _ in stood if _get(place).is_meta]
        tensors = self._fetched(page)
        try:
            self._load(self._model, tensors, self._dtype, self._device)
        except ValueError as error:
            raise CheckpointError(f"{page.name or 'the model'} cannot be read apart from the rest: {error}") from error
        del tensors
        for place in empty:
            if not _get(place).is_meta:
                again(self._steps.get(self._names[place], ()), _get(place))
        self._spread()
        self._require({place for door in page.doors for place in _places(door)})
        filled = {place for place in empty if not _get(place).is_meta}
        for place in filled:
            _get(place).requires_grad_(False)
            if self._names[place] in self._unread:
                self._show({place}, [_get(place)])
        return [(place, value) for place, value in stood if place in filled]

    def _show(self, places: set[Place], pieces: Iterable[Tensor]) -> None:
        """Shows the values of a parameter or buffer, which may be in several places."""
        names = {self._names[place]: _get(place) for place in places}
        self._unread -= names.keys()
        looks = [look for name, value in names.items() for look in self._see(name, value)]
        for piece in pieces if looks else ():
            for look in looks:
                look.add(piece)
        for look in looks:
            look.done()

    def _stand_in(self, page: Page) -> None:
        """Puts a NaN tensor of the same shape, dtype and device in the place of an embedding that is not in memory,
        because some models ask an embedding's weights for their device."""
        made: dict[int, nn.Parameter] = {}  # one for a tied tensor
        for place in {place for door in page.doors for place in _places(door)}:
            meta = _get(place)
            if meta.is_meta:
                nothing = torch.full((), torch.nan, dtype=meta.dtype, device=self._device).expand(meta.shape)
                made.setdefault(id(meta), nn.Parameter(nothing, requires_grad=False))
                self._meta[place] = meta
                _set(place, made[id(meta)])

    def _require(self, places: set[Place]) -> None:
        missing = sorted(self._names[place] for place in places if _get(place).is_meta)
        if missing:
            raise CheckpointError(
                f"{listed(missing)}: made by transformers when it loads the whole model, so the weights cannot be read "
                "in parts"
            )

    def _spread(self) -> None:
        """Copies the tensor in one place of a tied group to all of its places."""
        for group in self._ties:
            real = next((v for v in (_get(place) for place in group) if not v.is_meta), None)
            if real is not None:
                for place in group:
                    if _get(place).is_meta:
                        _set(place, real)


def _get(place: Place) -> Tensor:
    module, name = place
    found: Tensor = getattr(module, name)
    return found


def _set(place: Place, value: Tensor) -> None:
    module, name = place
    setattr(module, name, value)


def _places(module: nn.Module) -> Iterator[Place]:
    for inner in module.modules():
        yield from ((inner, name) for name, _ in own_tensors(inner))


# -- doors -------------------------------------------------------------------------------------------------------------

# Doors are part of the model, not instruments: they stay, and change nothing that it computes.


def guard(weights: Pager, page: Page, door: nn.Module) -> None:
    """Makes the module ask for its page whenever it is about to run without it; an embedding asks for rows only."""
    if page.by_rows and isinstance(door, nn.Embedding):
        _guard_rows(weights, page, door)
        return

    def ask(module: nn.Module, args: Any) -> None:
        if weights.held is not page:
            weights.at_door(page)

    door.register_forward_pre_hook(ask)


def _guard_rows(weights: Pager, page: Page, door: nn.Embedding) -> None:
    """Gives the embedding the rows that it looks up, for the time of its call."""
    under_way: list[_Rows] = []

    def begin(module: nn.Module, args: Any) -> None:
        if weights.held is not page:
            under_way.append(_Rows(weights, page, door.weight))
            under_way[-1].__enter__()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if under_way:
            under_way.pop().__exit__(None, None, None)

    door.register_forward_pre_hook(begin)
    door.register_forward_hook(end, always_call=True)


class _Rows(TorchFunctionMode):
    """While active, reads the rows that are looked up in a table that is not in memory. The embedding's own code still
    runs around the lookup: scales, offsets of positions."""

    def __init__(self, weights: Pager, page: Page, table: Tensor) -> None:
        super().__init__()
        self._weights, self._page, self._table = weights, page, table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip(("input", "weight"), args, strict=False)) | (kwargs or {})
        if func is not nn.functional.embedding or given["weight"] is not self._table:
            return func(*args, **(kwargs or {}))
        rows, numbers = torch.unique(given["input"], return_inverse=True)
        if rows.numel() and not 0 <= int(rows[0]) <= int(rows[-1]) < len(self._table):
            raise IndexError("index out of range in self")  # torch's own error; behind the table lies another tensor
        # padding_idx, which matters to gradients only, is dropped
        return func(numbers, self._weights.rows(self._page, rows.tolist()))
