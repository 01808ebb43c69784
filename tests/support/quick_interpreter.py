"""Triton's interpreter without what it does for nothing: two thirds of its time."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def quicken() -> None:
    """Spare Triton's interpreter what it does again at every call and for every value; it computes the same.

    Two thirds of its time: at each call of a function within a kernel it looks through the whole language for what to
    put in place, though that is in place until the kernel ends; it computes whether sums of integers overflow, and
    drops the answer, which is for debugging; for every value it makes the type of its shape.
    """
    from triton.language import constexpr, core
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    put_in_place, here = interpreter._patch_lang, set()

    @functools.cache
    def modules_of(function: Any) -> frozenset[Any]:
        modules = (value for value in function.__globals__.values() if inspect.ismodule(value))
        return frozenset(module for module in modules if module in (interpreter.tl, core))

    def once_a_kernel(function: Any) -> Any:
        if modules_of(function) <= here:
            return None
        scope = put_in_place(function)
        if not here:  # the kernel itself: what it calls does not take back what is in place
            scope.restore = lambda: (here.clear(), type(scope).restore(scope))
        here.update(modules_of(function))
        return scope

    block_init, value_init = core.block_type.__init__, core.tensor.__init__
    number_of, numbers = interpreter._get_np_dtype, {}

    def once_a_name(kind: Any) -> Any:
        if (name := kind.name) not in numbers:
            numbers[name] = number_of(kind)
        return numbers[name]

    @functools.cache
    def block_of(*sizes: int) -> tuple[Any, int, str]:
        block_init(made := object.__new__(core.block_type), core.int32, list(sizes))
        return made.shape, made.numel, str(made.shape)

    @functools.cache
    def value_of(*sizes: int) -> tuple[Any, Any]:
        kind = core.block_type(core.int32, list(sizes)) if sizes else core.int32
        value_init(made := object.__new__(core.tensor), None, kind)
        return made.shape, made.numel

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (size.value if type(size) is constexpr else size for size in shape)
        self.element_ty, (self.shape, self.numel, written) = element_ty, block_of(*sizes)
        self.name = f"<{written}, {element_ty}>"

    def make_value(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = value_of(*(kind.shape.values if kind.is_block() else ()))

    interpreter._patch_lang, interpreter._get_np_dtype = once_a_kernel, once_a_name
    core.block_type.__init__, core.tensor.__init__ = make_block, make_value
