"""The reports inside a page, read back by other means than its script or what packed them."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from typing import Any


def reports_in(page: str) -> list[dict[str, Any]]:
    """What the page holds of each report: its source, what was left out, and the report."""
    found = re.search(r'<script type="application/zlib" id="reports" data-doubles="(\d+)">([^<]*)</script>', page)
    assert found is not None
    count, content = int(found[1]), zlib.decompress(base64.b64decode(found[2]))
    numbers = iter([struct.unpack("<d", content[i : 8 * count : count])[0] for i in range(count)])
    text = re.sub("\x01", lambda _: repr(next(numbers)), content[8 * count :].decode("ascii"))
    return json.loads(text)  # type: ignore[no-any-return]
