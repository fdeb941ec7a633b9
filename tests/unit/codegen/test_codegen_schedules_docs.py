"""The pictures in the documentation are those that the schedules have."""

import re

from locations import REPOSITORY

from smpc.codegen.schedules.named import NAMES, choose, table
from smpc.codegen.simulate import Costs, chain

DOCS = REPOSITORY / "docs" / "schedules.md"


def test_pictures():
    pictures = re.findall(r"<!-- table: (\S+) (\d+) (\d+) -->\n```text\n(.*?)```\n", DOCS.read_text(), re.DOTALL)
    assert {name for name, *_ in pictures} == set(NAMES) - {"list"}
    for name, p, m, picture in pictures:
        choice = choose(int(p), int(m), schedule=name)
        num_stages = len(choice.placement)
        assert table(choice.build(chain(num_stages), Costs.uniform(num_stages))) == picture, name
