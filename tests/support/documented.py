"""The code of the documentation, for tests that run it."""

import re
from dataclasses import dataclass

from locations import REPOSITORY
from markdown_it import MarkdownIt

PAGES = ("README.md", *sorted(str(p.relative_to(REPOSITORY)) for p in (REPOSITORY / "docs").rglob("*.md")))


@dataclass(frozen=True)
class Block:
    """Code on a page: its language, "" where it is indented or has none, the line of its first line, and its text."""

    page: str
    language: str
    line: int
    text: str

    def run(self, names):
        """Execute it as Python; a traceback has the page and its lines."""
        exec(compile("\n" * (self.line - 1) + self.text, self.page, "exec"), names)


def all_blocks(page):
    """Every block of code on a page, in order. `page`: its path in the repository."""
    tokens = MarkdownIt("commonmark").enable("table").parse((REPOSITORY / page).read_text())
    return [
        Block(page, token.info.strip(), token.map[0] + 1 + (token.type == "fence"), token.content)
        for token in tokens
        if token.type in ("fence", "code_block")
    ]


def blocks(page, language="python"):
    """The blocks of one language on a page of docs/, in their order."""
    found = [block.text for block in all_blocks(f"docs/{page}") if block.language == language]
    assert found, f"{page} has no {language}"
    return found


def commands(block):
    """The commands of a block of shell: a line each, without comments."""
    lines = (re.split(r"(?:^|\s+)# ", line)[0].strip() for line in block.text.splitlines())
    return [line for line in lines if line]
