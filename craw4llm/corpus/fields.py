"""Fields of a Parquet row or a JSON object as a page: which there are, what they are called, and what they may hold.

    names = field_names(columns, has)     -> {"url": "link", "text": "text", ...}: our name -> the source's, of those that it has
    page_of(file, position, values)       -> Page, or Reject with a reason

url        string                      anchors     list of strings or nulls, one for each link
text       string; null: empty         link_flags  list of integers, LinkFlag bits, one for each link
outlinks   list of strings, absolute   doc_id      string or integer: the source's own id       score    number
           or relative; null: none     language    string (also called `lang`)                  package  string: the page's `source`
canonical  string: rel=canonical       signals     integer: Signal bits of craw4llm.corpus.records
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

from craw4llm.configs import Column
from craw4llm.corpus.records import LinkFlag, Page, Reject, Signal
from craw4llm.errors import InputError

REQUIRED = ("url", "text", "outlinks")
_OTHERWISE = {"language": "lang"}  # the commonest other spelling, taken where the first is not there
_ALL_FLAGS, _ALL_SIGNALS = sum(LinkFlag), sum(Signal)


def field_names(columns: Sequence[tuple[str, str]], has: Collection[str], where: str) -> dict[str, str]:
    """Our name -> the source's. Raises InputError where `columns` names one that is not there."""
    given = dict(columns)
    names = {}
    for name in get_args(Column):
        wanted = given.get(name, name)
        if wanted in has:
            names[name] = wanted
        elif name in given:
            raise InputError(
                f"corpus: {where} has no field {wanted!r}, which `columns` names for {name}; it has {', '.join(has) or 'none'}"
            )
        elif _OTHERWISE.get(name) in has:
            names[name] = _OTHERWISE[name]
    return names


def page_of(file: str, position: int, values: Mapping[str, Any]) -> Page | Reject:
    """A page of these values, by our names; a Reject where one has a type that it cannot have."""
    package = values.get("package")
    source = package if isinstance(package, str) and package else file
    links = values.get("outlinks")
    anchors, flags = values.get("anchors"), values.get("link_flags")
    doc_id, score = values.get("doc_id"), values.get("score")
    signals = values.get("signals")
    fits = (
        _is_list(links)
        and _is_list(anchors)
        and (flags is None or (_is_list(flags) and all(type(flag) is int and 0 <= flag <= _ALL_FLAGS for flag in flags)))
        and (signals is None or (type(signals) is int and 0 <= signals <= _ALL_SIGNALS))
        and (score is None or type(score) in (int, float))
        and (doc_id is None or type(doc_id) in (int, str))
    )
    if not fits:
        return Reject(source, position, str(values.get("url") or ""), "bad_field")
    return Page(
        source,
        position,
        values.get("url"),
        values.get("text"),
        links or (),
        anchors=[anchor if isinstance(anchor, str) else None for anchor in anchors] if anchors else (),
        link_flags=flags or (),
        canonical=values.get("canonical") if isinstance(values.get("canonical"), str) else None,
        signals=signals or 0,
        doc_id=None if doc_id is None else str(doc_id),
        language=values.get("language") if isinstance(values.get("language"), str) else None,
        score=_number(score),
    )


def _is_list(value: object) -> bool:
    return value is None or isinstance(value, list)


def _number(score: object) -> float | None:
    """A finite float32; anything else is no score."""
    if not isinstance(score, int | float):
        return None
    try:
        number = float(score)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) < 3.4e38 else None
