"""Traces programs: which statements a program would run, without a model, our nodes included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from vlora_sgl.core import AdapterId
from vlora_sgl.lang import _upstream as up
from vlora_sgl.lang.interpreter import StateGroup
from vlora_sgl.lang.ir import INHERIT, SglAdapter, SglHead, effective


class TracerState(up.tracer.TracerProgramState):
    """Stands for a state while tracing: collects nodes and variables."""

    adapter: AdapterId = None

    def _execute(self, other: up.SglExpr | str) -> TracerState:
        super()._execute(other)
        if isinstance(other, SglHead):
            self.variables[other.name] = up.SglVariable(other.name, source=other)
        return self

    def _append_node(self, other: up.SglExpr) -> None:
        super()._append_node(other)
        if isinstance(other, SglAdapter):
            self.adapter = other.name
        if isinstance(other, (up.SglGen, up.SglSelect, SglHead)):
            other.answered_by = effective(getattr(other, "adapter", INHERIT), self.adapter)

    def _role_common(self, name: str, expr: up.SglExpr | str | None = None) -> TracerState | _Turn:
        # SGLang's state hands this to its executor, and a tracer has none.
        if expr is not None:
            self._execute(up.SglExprList([up.SglRoleBegin(name), expr, up.SglRoleEnd(name)]))
            return self
        return _Turn(self, name)

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> StateGroup:
        """Branches, traced as children of this state."""
        fork = up.SglFork(size)
        fork.prev_node = self.last_node
        branches = []
        for index in range(size):
            branch = TracerState(self.backend, self.arguments, self.only_trace_prefix)
            branch.last_node = up.SglGetForkItem(index)
            branch.last_node.prev_node = fork
            branch.variables = dict(self.variables)
            branch.messages_ = list(self.messages_)
            branch.cur_role = self.cur_role
            branch.adapter = effective(INHERIT, self.adapter)
            branches.append(branch)
        return cast(StateGroup, _TracedGroup(branches, self))

    def graph(self) -> str:
        """The statements, one a line, each answer with the adapter that gives it; then those of each branch."""
        lines = []
        for node in self.flatten_nodes():
            by = f" by {node.answered_by or 'the base model'}" if hasattr(node, "answered_by") else ""
            lines.append(f"%{node.node_id} = {node!r}{by}")
        for number, child in enumerate(self.child_states):
            lines += [f"branch {number}:", *(f"  {line}" for line in child.graph().splitlines())]
        return "\n".join(lines)


class _TracedGroup(up.ProgramStateGroup):
    """Branches of a traced fork; joining them gathers the variables as nodes."""

    def join(self, mode: str = "gather_variable") -> None:
        for branch in self.states:
            for name, variable in branch.variables.items():
                self.src_state.variables.setdefault(name, variable)

    def __iter__(self) -> Iterator[TracerState]:
        return iter(self.states)

    def __len__(self) -> int:
        return len(self.states)


class _Turn:
    def __init__(self, state: TracerState, role: str) -> None:
        self.state, self.role = state, role

    def __enter__(self) -> None:
        self.state._execute(up.SglRoleBegin(self.role))

    def __exit__(self, *_: object) -> None:
        self.state._execute(up.SglRoleEnd(self.role))


def trace_program(
    program: up.SglFunction, arguments: dict[str, object], backend: up.BaseBackend | None
) -> TracerState:
    """Run the program's function on a tracer; parameters without an argument become placeholders."""
    placeholders = {name: up.SglArgument(name, None) for name in program.arg_names if name not in arguments}
    known = {**placeholders, **arguments, **program.bind_arguments}
    tracer = TracerState(backend or up.BaseBackend(), known, only_trace_prefix=False)
    with up.tracer.TracingScope(tracer):
        tracer.ret_value = program.func(tracer, **known)
    return tracer
