"""What the site has beyond the pages of docs/, as a hook of mkdocs: API reference and the pages of the root.

mkdocs.yml loads it, for `make site`. griffe reads the package's source without importing it, so neither torch nor
Megatron is needed.
"""

import re
from html import unescape
from pathlib import Path

import griffe
import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import megatron_pg

ROOT = Path(__file__).parents[1]
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
MODULES = ("args", "pretrain", "cp_utils", "reducers", "objectives", "kernels", "lm_head", "metrics")
LAZY = sorted(set(megatron_pg.__all__) - {"__version__"})  # no static reader finds these, so they are listed
_FORMULA = re.compile(r'<(?P<kind>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=kind)>', re.DOTALL)
API = {name: f"api/{name}.md" for name in ("megatron_pg", *(f"megatron_pg.{module}" for module in MODULES))}


def on_config(config: MkDocsConfig) -> None:
    """Add the API and the pages of the root to the navigation of mkdocs.yml."""
    config.nav = [
        *(config.nav or ()),
        {"API": [{name: page} for name, page in API.items()]},
        {"Project": list(ROOT_PAGES)},
    ]
    config.copyright = f"megatron_pg {megatron_pg.__version__}, Apache-2.0"


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """The pages that are not in docs/."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    for name, page in API.items():
        members = f", members: {LAZY}" if name == "megatron_pg" else ""
        files.append(File.generated(config, page, content=f"::: {name}\n    options: {{heading_level: 1{members}}}\n"))


def on_page_markdown(markdown: str, *, page, **_: object) -> str:
    """Links between docs/ and the root, which are one folder here; fences in the form that mkdocs reads."""
    if "/" not in page.file.src_uri:
        markdown = markdown.replace("](../", "](").replace("](docs/", "](")
    return re.sub(r"^```(\w+) excerpt$", r"```\1", markdown, flags=re.MULTILINE)


def on_page_content(html: str, **_: object) -> str:
    """Formulas as MathML, which browsers draw without a script and without a network."""

    def drawn(match: re.Match) -> str:
        display = "block" if match["kind"] == "div" else "inline"
        return latex2mathml.converter.convert(unescape(match["tex"]), display=display)

    return _FORMULA.sub(drawn, html)


class Comments(griffe.Extension):
    """The comments after the fields of a class, and after a module's attributes, are their documentation."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: object) -> None:
        """A module's attribute."""
        if attr.docstring is None and attr.parent.is_module and (comment := _comment(attr)):
            attr.docstring = griffe.Docstring(comment, parent=attr)

    def on_class(self, *, cls: griffe.Class, **_: object) -> None:
        """The fields, as a table."""
        comments = {name: _comment(field) for name, field in cls.attributes.items() if field.docstring is None}
        rows = [f"    {name}: {comment}" for name, comment in comments.items() if comment]
        if rows and cls.docstring:
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(rows)


def _comment(attr: griffe.Attribute) -> str | None:
    found = re.search(r"  # (.+)", attr.source.partition("\n")[0])
    return found[1] if found else None
