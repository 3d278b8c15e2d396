"""Settings of the documentation. `make docs` builds it, with every warning an error."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Headrace"
author = "The Headrace authors"
project_copyright = "The Headrace authors; Apache-2.0"
release = version = installed_version("headrace")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "exchange_lexer",
    "llms_txt",
    "plain_docstrings",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"Headrace {release}"
html_static_path = ["_static"]
html_css_files = ["headrace.css"]
html_show_sphinx = False
html_copy_source = False

myst_enable_extensions = ["colon_fence", "fieldlist"]
myst_heading_anchors = 3

nitpicky = True
# Types in signatures: those of other libraries would need a network, and most of our own are nothing that users write.
# All else that a page refers to (terms, pages, headings) must be there.
nitpick_ignore_regex = [(r"py:.*", r".*")]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# `sphinx -b linkcheck`, which the nightly job runs.
linkcheck_ignore = [r"https?://(127\.0\.0\.1|localhost|MACHINE|HEAD)\b"]
linkcheck_timeout = 20
linkcheck_retries = 3

copybutton_prompt_text = "$ "
