"""What pyproject.toml cannot say: `smpc_alias.pth` lies beside the installed package, where Python reads it when it starts."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

_HOOK = Path("src", "smpc_alias.pth")


class BuildWithHook(build_py):
    """Builds the modules, and puts the hook where they are installed to."""

    def run(self) -> None:
        """Build."""
        super().run()
        folder = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(_HOOK, folder)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """What was built."""
        return [
            *super().get_outputs(include_bytecode),
            *([] if self.editable_mode else [str(Path(self.build_lib, _HOOK.name))]),
        ]


setup(cmdclass={"build_py": BuildWithHook})
