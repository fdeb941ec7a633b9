"""Scripts that import `smdistributed.modelparallel.torch`, `torch.sagemaker` or `composer` get smpc: their names as import names.

    import smpc; smpc.alias()                              in the script, before its other imports
    smpc run --alias -n 2 train.py                         the script as it is
    SMPC_ALIAS=1 torchrun --nproc-per-node 2 train.py      the script as it is, under any launcher

Terms
    alias    a module of one of the names below. It has no code: each attribute is looked up in its target when it is read, so that
             importing an alias imports neither torch nor smpc's own modules, and starts nothing
    target   the module of smpc that the alias redirects to

The finder first looks for an installed package of that name. If there is one, it is imported, a warning says so, and no alias is made
below it.

When Python starts, the line in `smpc_alias.pth` beside the installed package reads SMPC_ALIAS; so it also applies to processes that a
script starts. `smpc run` installs the finder itself.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

VARIABLE = "SMPC_ALIAS"
RELEASE = "1.15.0"  # of SMP, the last of its first interface: what `__version__` says, as scripts compare it
RELEASE_V2 = "2.6.0"
RELEASE_COMPOSER = "0.16.4"
_TOP = "smdistributed"
_PACKAGE = "smdistributed.modelparallel"
_SMP = f"{_PACKAGE}.torch"
_SAGEMAKER = "torch.sagemaker"
_COMPOSER = "composer"
_PACKAGES = {
    _PACKAGE: "import smpc.v1 as smp",
    _SAGEMAKER: "import smpc.v2 as tsm",
    _COMPOSER: "from smpc.composer import Trainer",
}  # the package that may be installed, and what to write instead
_FAMILIES = ("bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta", "t5", "vit")
_V2 = (
    "checkpoint",
    "checkpoint.constants",
    "checkpoint.utils",
    "context_parallel",
    "context_parallel.utils",
    "delayed_param",
    "distributed",
    "distributed.checkpoint",
    "distributed.checkpoint.async_utils",
    "distributed.checkpoint.filesystem",
    "distributed.checkpoint.s3_filesystem",
    "distributed.checkpoint.state_dict_loader",
    "distributed.checkpoint.state_dict_saver",
    "distributed.checkpoint.state_dict_utils",
    "distributed.fsdp",
    "distributed.fsdp.fully_sharded_data_parallel",
    "grad_norm",
    "logger",
    "moe",
    "moe.moe_config",
    "moe.moe_layer",
    "nn",
    "nn.attn",
    "nn.huggingface",
    "nn.huggingface.llama_flashattn",
    "state_handler",
    "tensor_parallel",
    "tensor_parallel.transformer",
    "utils",
    "utils.module_utils",
    "utils.process_group_utils",
    "utils.utils",
)
# Every alias with its target; None: it has submodules and `__version__` alone.
TARGETS: MappingProxyType[str, str | None] = MappingProxyType(
    {
        _TOP: None,
        _PACKAGE: None,
        _SMP: "smpc.v1",
        **{
            f"{_SMP}.{name}": f"smpc.v1.{name}"
            for name in (
                "amp",
                "model",
                "nn",
                "nn.huggingface",
                "optimizers",
                "patches",
                "patches.checkpoint",
                "state_mod",
                "utils",
            )
        },
        **{f"{_SMP}.nn.huggingface.{name}": f"smpc.v1.nn.huggingface.{name}" for name in _FAMILIES},
        _SAGEMAKER: "smpc.v2",
        **{f"{_SAGEMAKER}.{name}": f"smpc.v2.{name}" for name in _V2},
        _COMPOSER: "smpc.composer",
        f"{_COMPOSER}.utils": "smpc.composer.utils",
        f"{_COMPOSER}.utils.dist": "smpc.dist",
        f"{_COMPOSER}.models": "smpc.composer.models",
        f"{_COMPOSER}.trainer": "smpc.composer",
    }
)


def alias() -> None:
    """Make `import smdistributed.modelparallel.torch` import `smpc.v1`, `torch.sagemaker` `smpc.v2`, `composer` `smpc.composer`.

    It applies to this process and to its child processes. If such a package is installed, scripts still import that package, and a
    warning says so. Calling `alias` again does nothing. It does not import torch.
    """
    install()
    os.environ[VARIABLE] = "1"
    for package in _PACKAGES:
        known = sys.modules.get(package)
        if known is not None and not _is_alias(package):
            _warn_of_installed(package, known.__spec__)
    for name in TARGETS:
        if not name.startswith("torch.") or "torch" in sys.modules:
            _import_alias(name)


def _import_alias(name: str) -> None:
    """Import an alias, unless it belongs to an installed package."""
    parent = name.rpartition(".")[0]
    if parent in ("", "torch", _TOP) or _is_alias(parent):
        importlib.import_module(name)


def install() -> None:
    """Install the finder, which makes aliases when they are imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether the environment switches aliases on."""
    return environ.get(VARIABLE, "").strip() not in ("", "0")


class _Alias(ModuleType):
    """A module with the attributes of its target."""

    def __getattr__(self, name: str) -> Any:
        own, target = self.__name__, TARGETS[self.__name__]
        if target is not None and (not name.startswith("__") or name == "__all__"):
            try:
                return getattr(importlib.import_module(target), name)
            except AttributeError:
                raise AttributeError(
                    f"module {own!r} is {target} here, which has no {name!r}; {_guide(own)} says what there is, and what to "
                    "write instead",
                    name=name,
                    obj=self,
                ) from None
        raise AttributeError(f"module {own!r} has no attribute {name!r}", name=name, obj=self)

    def __dir__(self) -> list[str]:
        target = TARGETS[self.__name__]
        return sorted({*super().__dir__(), *([] if target is None else dir(importlib.import_module(target)))})


def _guide(name: str) -> str:
    if name.partition(".")[0] == _COMPOSER:
        return "docs/trainer.md"
    return "docs/smp_v2.md" if name.startswith(_SAGEMAKER) else "docs/coming_from_smp.md"


class _Loader(Loader):
    """Makes aliases."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An alias."""
        return _Alias(spec.name, f"See `{TARGETS[spec.name] or _SMP}`.")

    def exec_module(self, module: ModuleType) -> None:
        """Runs nothing; sets the version."""
        releases = {_SAGEMAKER: RELEASE_V2, _COMPOSER: RELEASE_COMPOSER}
        found = (release for name, release in releases.items() if module.__name__.startswith(name))
        vars(module)["__version__"] = next(found, RELEASE)


class _Finder(MetaPathFinder):
    """Finds the installed package, if there is one, and an alias otherwise."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module; None for a name that is not an alias, which other finders look for."""
        if fullname not in TARGETS:
            return None
        if fullname == _TOP or fullname in _PACKAGES:
            if (real := _installed_spec(fullname, path, target)) is not None:
                if fullname in _PACKAGES:
                    _warn_of_installed(fullname, real)
                return real
        elif not _is_alias(fullname.rpartition(".")[0]):
            return None  # of the installed package
        is_package = any(name.startswith(f"{fullname}.") for name in TARGETS)
        return ModuleSpec(fullname, _Loader(), origin=f"smpc alias of {TARGETS[fullname]}", is_package=is_package)


def _installed_spec(fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """Where a package of that name is installed, or None."""
    for finder in sys.meta_path:
        if not isinstance(finder, _Finder):
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and (
                fullname != _COMPOSER or spec.origin is not None
            ):  # any folder of that name would be found
                return spec
    return None


def _is_alias(name: str) -> bool:
    return isinstance(sys.modules.get(name), _Alias)


def _warn_of_installed(package: str, real: ModuleSpec | None) -> None:
    """Warns that a package of that name is installed and imported in place of smpc."""
    where = "" if real is None else real.origin or ", ".join(real.submodule_search_locations or ())
    warnings.warn(
        f"{package} is installed ({where}): it is imported in place of smpc; uninstall it to run this script on "
        f"smpc, or write {_PACKAGES[package]}",
        stacklevel=3,
    )
