"""The page's files, without a browser: small, alone, and with nothing that its policy would refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vlora_sgl import page

MOST_BYTES = 200 * 1024
TEXTS = {path: page.content(path).decode() for path in page.FILES}


def test_there_are_no_other_files_and_all_are_small() -> None:
    folder = Path(page.__file__).parent
    assert {path.name for path in folder.iterdir() if path.is_file()} == {
        "__init__.py",
        *(name for name, _ in page.FILES.values()),
    }
    assert sum(map(len, TEXTS.values())) < MOST_BYTES


@pytest.mark.parametrize("path", TEXTS)
def test_nothing_is_asked_of_anywhere_else(path: str) -> None:
    assert not re.search(r"https?:|//[\w-]+\.\w|@import|url\(", TEXTS[path])


def test_no_code_or_style_is_inline() -> None:
    html = TEXTS["/ui"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|javascript:", html)
    assert set(re.findall(r'(?:href|src)="(ui/[^"]+)"', html)) == {path[1:] for path in page.FILES if path != "/ui"}


def test_what_a_server_says_never_becomes_markup() -> None:
    script = TEXTS["/ui/page.js"]
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|srcdoc"
    assert not re.search(forbidden, script)


def test_every_element_that_the_script_names_is_there_and_every_form_field_has_a_label() -> None:
    html, script = TEXTS["/ui"], TEXTS["/ui/page.js"]
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'\$\("([\w-]+)"\)', script)) <= set(ids)
    for field in re.findall(r"<(?:input|textarea)[^>]*>", html):
        name = re.search(r'id="([^"]+)"', field)
        assert name is not None
        before = html[: html.index(field)]
        assert f'for="{name[1]}"' in html or before.rindex("<label") > before.rfind("</label>"), field


def test_the_policy_allows_this_server_alone() -> None:
    policy = dict(part.split(" ", 1) for part in page.HEADERS["Content-Security-Policy"].split("; "))
    for what in ("default-src", "base-uri", "form-action", "frame-ancestors"):
        assert policy[what] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in page.HEADERS["Content-Security-Policy"]
