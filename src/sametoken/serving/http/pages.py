"""The server's own pages, for people. Everything that they load comes from this server."""

from __future__ import annotations

from importlib.resources import as_file, files

from fastapi import APIRouter
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

#: Scripts, styles and libraries of the pages; they need no key, as the pages do not.
ASSETS = "/assets"
_POLICY = "default-src 'none'; connect-src 'self'; img-src data:; script-src 'self'; style-src "


def page_routes() -> APIRouter:
    """The page at ``/``, and the API's document for people at ``/docs``."""
    router = APIRouter()
    with as_file(files("sametoken.serving.http").joinpath("page")) as folder:
        status, docs = ((folder / f"{name}.html").read_text("utf-8") for name in ("index", "docs"))

    @router.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        """A page with the server's status and a chat box."""
        return _html(status, "'self'")

    @router.get("/docs", include_in_schema=False)
    async def api_docs() -> HTMLResponse:
        # Swagger UI styles its elements in place.
        return _html(docs, "'self' 'unsafe-inline'")

    return router


def page_assets() -> StaticFiles:
    """What the pages load; FastAPI before 0.137 leaves mounts of an included router out."""
    with as_file(files("sametoken.serving.http").joinpath("page", "assets")) as folder:
        return StaticFiles(directory=folder)


def _html(text: str, styles: str) -> HTMLResponse:
    return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY + styles})
