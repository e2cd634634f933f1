"""The README's map: one line a file, in the form "- `path`: what it is"."""

from __future__ import annotations

import re
from collections import Counter

from source_tree import ROOT, package_modules

LINE = re.compile(r"^\s*[-*] `([^`]+\.(?:py|sh|toml|sbatch))`: \S.*$", re.MULTILINE)


def listed() -> Counter[str]:
    return Counter(LINE.findall((ROOT / "README.md").read_text(encoding="utf-8")))


def test_every_module_is_on_the_map() -> None:
    modules = {module.path for module in package_modules() if not module.is_package}
    missing = sorted(modules - set(listed()))
    assert not missing, "not in README.md:\n" + "\n".join(missing)


def test_the_map_names_every_file_once_and_none_that_is_not_there() -> None:
    paths = listed()
    wrong = [f"{path}: {count} times" for path, count in paths.items() if count > 1]
    wrong += [f"{path}: no such file" for path in paths if not (ROOT / path).is_file()]
    assert not wrong, "README.md:\n" + "\n".join(wrong)
