"""What `mkdocs build` is told beside the pages: the table of configuration keys, the reference of the interface, the gallery.

They are made from the code while the site is built, so they cannot fall behind it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import configuration
import gallery
import reference


def on_config(config: MkDocsConfig) -> None:
    """Put the pages of the reference where the navigation says `api/`."""
    for section in config.nav or []:
        for entry in section.get("Reference", []) if isinstance(section, dict) else []:
            if isinstance(entry, dict) and "Python" in entry:
                entry["Python"] = [{name: path} for name, path in reference.navigation()]


@event_priority(100)  # before the plugins, which look at all files
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that are generated."""
    made: dict[str, str] = {"configuration.md": configuration.page()}
    made |= reference.pages()
    made |= gallery.pages()
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files
