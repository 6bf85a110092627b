"""Load a kernel's file from a checkout (`--source vllm=DIR`) without installing the project.

Only the file that is asked for comes from the tree. Whatever else of the project it imports is a
stub (`kvfuzz.kernels.stubs`), apart from a few known values. The loaded code has an `__import__`
of its own, so imports in its functions find the stubs for as long as it lives, while
`sys.modules`, and an installed package of the same name, stay as they are.
"""

import builtins
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.stubs import StubModule

Known = Mapping[str, Mapping[str, object]]
"""Values of stubbed modules that are real, by module name and attribute."""


class SourceTree:
    """A checkout of `project`, whose modules are stubs unless `load` names them."""

    def __init__(self, project: str, root: Path, *, known: Known, also: Sequence[str] = ()) -> None:
        """`also` names further top-level packages to stub."""
        self.project = project
        self.root = root
        self._known = known
        self._tops = {project, *also}
        self._modules: dict[str, ModuleType] = {}

    def find(self, *candidates: str) -> Path:
        """The first of `candidates` (paths under the root) that exists.

        Raises NotCheckedError naming what was looked for.
        """
        for candidate in candidates:
            if (path := self.root / candidate).is_file():
                return path
        raise NotCheckedError(
            f"--source {self.project}={self.root}: no {' or '.join(candidates)} there; "
            f"pass the folder of a release or checkout that contains {self.project}/"
        )

    def load(self, *candidates: str) -> ModuleType:
        """The module of the first of `candidates` that exists; executed once.

        Raises NotCheckedError where there is none, or where executing it fails.
        """
        path = self.find(*candidates)
        name = ".".join(path.relative_to(self.root).with_suffix("").parts)
        loaded = self._modules.get(name)
        if loaded is None or isinstance(loaded, StubModule):
            loaded = self._modules[name] = self._execute(name, path)
            parent, _, last = name.rpartition(".")
            setattr(self._stub(parent), last, loaded)
        return loaded

    def _execute(self, name: str, path: Path) -> ModuleType:
        module = ModuleType(name)
        source = path.read_bytes()
        tag = hashlib.sha256(str(path).encode() + source).hexdigest()[:16]
        module.__dict__.update(
            __file__=str(path),
            __package__=name.rpartition(".")[0],
            __builtins__={**vars(builtins), "__import__": self._import},
            # Dataclasses and pickles look their module up by name; this one cannot be anybody's.
            __name__=(private := f"kvfuzz_source_{tag}.{name}"),
        )
        sys.modules[private] = module
        try:
            exec(compile(source, str(path), "exec"), module.__dict__)
        except Exception as error:
            del sys.modules[private]
            raise NotCheckedError(
                f"--source {self.project}={self.root}: {name} does not load: "
                f"{type(error).__name__}: {error}"
            ) from error
        return module

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if level:
            package = str((globals or {}).get("__package__", "")).split(".")
            name = ".".join(filter(None, (*package[: len(package) - level + 1], name)))
        elif name.partition(".")[0] not in self._tops:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        module = self._stub(name)
        return module if fromlist else self._modules[name.partition(".")[0]]

    def _stub(self, name: str) -> ModuleType:
        """The module called `name` and, as Python does, its parents."""
        if name not in self._modules:
            self._modules[name] = StubModule(name, self._known.get(name))
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(self._stub(parent), last, self._modules[name])
        return self._modules[name]
