"""Results as the type that the host asked for, and as what is recorded of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pydantic

from natsreceipts.errors import ResultTypeMismatch
from natsreceipts.options import adapter_of
from natsreceipts.wire import encode_payload

if TYPE_CHECKING:
    from natsreceipts.identity import ReceiptKey
    from natsreceipts.options import CallOptions

__all__ = ["encoded", "typed"]


def typed(key: ReceiptKey, options: CallOptions, value: Any) -> Any:
    """The recorded value as a ``result_type``. Raises ResultTypeMismatch."""
    if options.result_type is None:
        return value
    try:
        return adapter_of(options.result_type).validate_python(value)
    except pydantic.ValidationError as error:
        raise ResultTypeMismatch(key, str(error), result=value) from error


def encoded(options: CallOptions, result: object) -> tuple[bytes, Any]:
    """The payload's JSON and the value as a replay would read it, before it is given its type."""
    if options.result_type is not None:
        result = adapter_of(options.result_type).dump_python(result, by_alias=True, round_trip=True, warnings=False)
    return encode_payload(result)
