"""Every Python block of the README and the docs runs, page by page, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda page: page.name)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    names: dict[str, object] = {"__name__": "__example__"}
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 1
        # Blank lines in front, so that a failure points at the line in the page.
        exec(compile("\n" * line + block[1], str(page), "exec"), names)


def test_every_operation_has_a_page_with_an_example() -> None:
    from omnigemm.core.problem import OPS

    for op in OPS:
        page = ROOT / "docs" / "ops" / f"{op}.md"
        assert BLOCK.search(page.read_text()), page


def headings(page: Path) -> set[str]:
    """As links name them: small letters, hyphens for spaces, without marks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for name, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            if "://" not in name:
                target = page.parent / name if name else page
                assert target.exists(), f"{page}: {name}"
                assert not heading or heading in headings(target), f"{page}: {name}#{heading}"


def test_support_table_is_what_the_backends_say() -> None:
    from omnigemm.core.support import table

    assert (ROOT / "docs" / "support.md").read_text() == table(), (
        "run: python -m omnigemm.core.support > docs/support.md"
    )


def test_settings_page_lists_every_environment_variable() -> None:
    from omnigemm.core.settings import ENVIRONMENT

    assert len(ENVIRONMENT) <= 10
    text = (ROOT / "docs" / "settings.md").read_text()
    for name in ENVIRONMENT:
        assert f"`{name}`" in text
