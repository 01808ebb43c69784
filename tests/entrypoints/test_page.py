"""Which of the page's routes need a key."""

from __future__ import annotations

from typing import Any

import pytest

from vlora_sgl import _sgl, page
from vlora_sgl.entrypoints.page import open_page, router

OPEN = {(method, path) for method in ("GET", "HEAD") for path in page.FILES}


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize(
    "path", [*page.FILES, "/ui/", "/uix", "/ui/../lora_adapters", "/vlora/live", "/generate", "/"]
)
@pytest.mark.parametrize("key", [None, "Bearer key"])
def test_only_the_page_s_files_are_sent_without_a_key(method: str, path: str, key: str | None) -> None:
    def decide(**asked: Any) -> Any:
        return open_page(
            _sgl.decide_request_auth,
            method=method,
            path=path,
            authorization_header=key,
            api_key="key",
            admin_api_key=None,
            auth_level=_sgl.AuthLevel.NORMAL,
        )

    assert decide().allowed == ((method, path) in OPEN or key is not None)


def test_every_file_has_its_route() -> None:
    assert {*page.FILES, "/vlora/live"} == {route.path for route in router.routes}
