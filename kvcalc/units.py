"""Parse and print sizes (bytes), rates, times, token counts and plain counts.

Sizes follow `numfmt --from=auto`: a bare letter (optionally followed by B) is a power of 1000, a letter with `i` is a
power of 1024. Token counts always use powers of 1024, as context lengths do (128k is 131,072). vLLM's --max-model-len
reads a lowercase letter as a power of 1000, so it has a separate parser here.

A number without a unit is refused if it is implausible in the base unit: `--kv-memory 80` does not mean 80 bytes. The
error suggests a likely spelling. A `Number` is always in the base unit and is accepted without one.
"""

from __future__ import annotations

from kvcalc.errors import UsageError
from kvcalc.limits import most_of

_LETTERS = "kmgtpe"
_SHOWN = 40
# No count of bytes or tokens has more digits. int() of a longer string is slow, and Python refuses more than 4,300.
_MAX_TEXT = 64

# Numbers below these need a unit: a size in bytes; a rate in bytes or operations per second.
_LEAST_BARE_SIZE = 1024 * 1024
_LEAST_BARE_RATE = 10**9
# The data rate of one port in one direction, in Gbit/s. InfiniBand: HDR is 200, NDR 400 and XDR 800 (InfiniBand Trade
# Association, InfiniBand roadmap). Ethernet: IEEE 802.3 (10G to 400G), 802.3df (800G). Headers take some per cent.
_NETWORKS = {
    "infiniband": (100, 200, 400, 800),
    "ethernet": (10, 25, 40, 50, 100, 200, 400, 800),
}  # fmt: skip
# Of watts.
_MOST_DIGITS = 5


class Number(str):
    """The text of a number that is in the base unit (bytes, bytes per second, seconds), like a number in JSON."""

    __slots__ = ()


def parse_size(text: str, option: str) -> int:
    """Bytes in `80G`, `80GB` (80 * 10^9), `80Gi`, `80GiB` (80 * 2^30), `85899345920` or `5.98GiB`.

    A fraction of a byte is dropped, because engines print sizes with two decimals. `option` names the value in the
    error. Raises UsageError if the text is not a size, not a whole number of bytes, or a number below 1 MiB without a
    unit. 0 needs no unit.
    """
    number, letters = _split(text)
    if _needs_unit(text, number, letters) and 0 < float(number) < _LEAST_BARE_SIZE:
        # A number from 1024 up is probably a figure from nvidia-smi, which prints MiB.
        raise _without_unit(text, option, "a size", f"{number}{'GiB' if float(number) < 1024 else 'MiB'}")
    return _size(text, option)


def parse_bandwidth(text: str, option: str) -> int:
    """Bytes per second in `3.35TB/s`, `900GB/s` or `3350G`. At least 1.

    Raises UsageError if the text is not a bandwidth, or is a number below 10^9 without a unit.
    """
    size = text.strip()
    size = size[: -len("/s")] if size.casefold().endswith("/s") else size
    number, letters = _split(size)
    if _needs_unit(text, number, letters) and 0 < float(number) < _LEAST_BARE_RATE:
        value = float(number)
        likely = value * (1e12 if value < 20 else 1e9 if value < 1e5 else 1e6)
        raise _without_unit(text, option, "a bandwidth", f"{_with_letter(likely)}B/s")
    try:
        rate = _size(size, option)
    except UsageError:
        rate = 0
    if rate < 1:
        raise _refused(text, option, "a bandwidth", "3.35TB/s or 900GB/s")
    return rate


def parse_network(text: str, option: str) -> int:
    """Bytes per second of a rate or of a named network: `50GB/s`, `infiniband-400g`. Raises UsageError."""
    rate = network_bytes_per_second(text.strip())
    if rate is None and text.strip()[:1].isalpha():
        raise UsageError(f"{option} {text[:40]!a}: not a network", f"50GB/s, or one of {', '.join(network_names())}")
    return parse_bandwidth(text, option) if rate is None else rate


def parse_pcie(text: str, option: str) -> int:
    """Bytes per second in one direction of a generation and its lanes, `pcie-3x8`, or of a rate. Raises UsageError."""
    kind, _, size = text.strip().casefold().partition("-")
    generation, _, lanes = size.partition("x")
    if kind == "pcie" and generation in ("3", "4", "5", "6") and lanes in ("1", "2", "4", "8", "16"):
        return int(lanes) * 10**9 << (int(generation) - 3)
    if kind[:1].isalpha():
        raise UsageError(f"{option} {text[:40]!a}: not a link", "pcie-4x16, pcie-3x8, or a rate such as 8GB/s")
    return parse_bandwidth(text, option)


def parse_watts(text: str, option: str) -> int:
    """The watts of a power: `220W`, `220`. Raises UsageError."""
    number = text.strip().casefold().removesuffix("w").rstrip()
    if not number.isdecimal() or len(number) > _MOST_DIGITS or not int(number):
        raise UsageError(f"{option} {text[:40]!a}: not a power", "watts of one device, such as 220W")
    return int(number)


def network_names() -> list[str]:
    """The names of the networks that `network_bytes_per_second` knows, such as `infiniband-400g`."""
    return [f"{kind}-{rate}g" for kind, rates in _NETWORKS.items() for rate in rates]


def network_bytes_per_second(name: str) -> int | None:
    """The data rate of one port of a network, in one direction. None for an unknown name."""
    kind, _, rate = name.casefold().rpartition("-")
    digits = rate.removesuffix("g")
    if rate == digits or not digits.isdecimal() or int(digits) not in _NETWORKS.get(kind, ()):
        return None
    return int(digits) * 10**9 // 8


def parse_flops(text: str, option: str) -> int:
    """Operations per second in `989T`, `989 TFLOPS`, `2.25P` or `989e12`. At least 1.

    Raises UsageError if the text is not a rate of operations, or is a number below 10^9 without a unit letter
    (`989` and `989 FLOPS` are both refused).
    """
    rate = text.strip().casefold()
    for unit in ("flop/s", "flops", "flop"):
        rate = rate.removesuffix(unit).rstrip()
    mantissa, e, power = rate.partition("e")
    number, rest = _split(mantissa)
    if number and not rest and (not e or (power.isdecimal() and len(power) <= 2)):
        from fractions import Fraction

        value = Fraction(number) * 10 ** int(power or 0)
        if _needs_unit(text, number, rest) and 0 < value < _LEAST_BARE_RATE:
            raise _without_unit(text, option, "a rate of operations", *_likely_flops(float(value)))
        flops = int(value)
    else:
        try:
            flops = _size(rate, option)
        except UsageError:
            flops = 0
    if flops < 1:
        raise _refused(text, option, "a rate of operations", "989T (989 x 10^12 per second)")
    return flops


def parse_tokens(text: str, option: str) -> int:
    """Tokens in `8192`, `131_072`, `8k` or `8K` (8,192), `1M` (1,048,576). At least 1; UsageError otherwise."""
    number, letter = _split(text)
    power = _power(letter)
    if not number or power is None:
        raise _refused(text, option, "a token count", "8192, 131_072, 8k (8,192) or 1M (1,048,576)")
    return _whole_tokens(number, 1024**power, text, option)


def parse_vllm_integer(text: str, option: str) -> int:
    """A number as vLLM's --max-model-len reads it: `8k` is 8,000, `25.6k` is 25,600 and `8K` is 8,192.

    An uppercase letter does not allow a decimal point.

    Source: human_readable_int in vllm/utils/argparse_utils.py, vLLM 0.33.0.
    """
    number, letter = _split(text)
    power = _power(letter)
    if not number or power is None or ("." in number and not letter.islower()):
        raise _refused(text, option, "a number in vLLM's format", "8192, 8k (8,000), 25.6k or 8K (8,192)")
    return _whole_tokens(number, (1000 if letter.islower() else 1024) ** power, text, option)


def parse_count(text: str, option: str, least: int = 1, most: int | None = None) -> int:
    """A whole number from `least` to `most` (None: the bound of the option's name); UsageError otherwise.

    Digits may be separated by `_`.
    """
    number, rest = _split(text)
    if not number or rest or "." in number:
        raise UsageError(
            f"{option} {_shown(text)}: not a whole number of at least {least}",
            "write it in digits, such as 16 or 1_000",
        )
    return _bounded(int(number), option, text, least, most)


def parse_requests(text: str, option: str) -> int:
    """A number of requests in digits, or in thousands or millions: `500k`, `10M`; UsageError otherwise."""
    number, unit = _split(text)
    scale = {"k": 1_000, "m": 1_000_000}.get(unit.strip().lower())
    if number and scale is not None and float(number) * scale == int(float(number) * scale):
        return _bounded(int(float(number) * scale), option, text, 1, None)
    return parse_count(text, option)


def check_count(value: object, name: str, least: int = 1) -> None:
    """Raise UsageError (exit 2) if `value`, from a Python program, is not a whole number from `least` to its bound."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{name} {value!r}: must be a whole number")
    if value > most_of(name):  # without the value, which may have more digits than Python prints
        raise UsageError(f"{name}: must be at most {most_of(name):,}")
    if value < least:
        _bounded(value, name, str(value), least)


def check_text(value: object, name: str) -> None:
    """Raise UsageError (exit 2) if `value`, from a Python program, is not a string."""
    if not isinstance(value, str):
        raise UsageError(f"{name} {shown(value)}: must be a string")


def shown(value: object) -> str:
    """A value from a Python program as a message shows it: on one line, and not too long."""
    try:
        text = repr(value)
    except ValueError:  # a number with more digits than Python prints
        text = type(value).__name__
    return text if len(text) <= 2 * _SHOWN else f"{text[: 2 * _SHOWN]}..."


def parse_seconds(text: str, option: str) -> float:
    """Seconds in `1.5s`, `30ms`, `200us`, `20min` or `8h`. UsageError if the time is not above 0 or has no unit."""
    number, unit = _split(text)
    scale = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}.get(unit.strip().lower())
    if not number or scale is None or not float(number) > 0:
        raise _refused(text, option, "a time above 0", "1.5s or 30ms")
    if _needs_unit(text, number, unit):
        likely = ("ms", "s") if float(number) >= 1 else ("s",)
        raise _without_unit(text, option, "a time", *(number + unit for unit in likely))
    return float(number) * scale


def format_hours(seconds: float) -> str:
    """A long time in hours, minutes or seconds with three digits."""
    unit, scale = ("h", 3600) if seconds >= 3600 else ("min", 60) if seconds >= 60 else ("s", 1)
    return f"{seconds / scale:.3g} {unit}"


def parse_rate(text: str, option: str) -> float:
    """A number per second, whole or not, above 0; UsageError otherwise."""
    number, rest = _split(text)
    if not number or rest or not float(number) > 0:
        raise _refused(text, option, "a number above 0", "20 or 0.5")
    return float(number)


def format_size(count: int, *, capacity: bool = False) -> str:
    """`count` bytes in powers of 1024 with two decimals, for human output.

    The size is rounded up, because a requirement must not look smaller than it is. With `capacity` it is rounded down.
    Below 1 KiB it is exact.
    """
    if count < 0:
        return "-" + format_size(-count, capacity=not capacity)
    if count < 1024:
        return f"{count} B"
    # Choose the unit after rounding, so that one byte less than 1 MiB is not printed as 1,024.00 KiB.
    for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"), start=1):
        scale = 1024**power
        hundredths = count * 100 // scale if capacity else -(-count * 100 // scale)
        if hundredths < 102_400 or unit == "EiB":
            return f"{hundredths // 100:,}.{hundredths % 100:02d} {unit}"
    raise AssertionError("unreachable: the last unit always returns")


def format_parameters(value: int) -> str:
    """A number of parameters to the nearest tenth, for human output: 70.6 B, 124.4 M."""
    if value < 1000:
        return str(value)
    # Choose the unit after rounding, as above: one parameter less than a billion is 1.0 B, not 1,000.0 M.
    for power, letter in enumerate("KMBT", start=1):
        tenths = (value * 10 + 1000**power // 2) // 1000**power
        if tenths < 10_000 or letter == "T":
            return f"{tenths // 10:,}.{tenths % 10} {letter}"
    raise AssertionError("unreachable: the last unit always returns")


def _size(text: str, option: str) -> int:
    """Bytes in a text with or without a unit; UsageError if it is not a size."""
    number, letters = _split(text)
    letters = letters.strip()
    if letters[-1:] in ("B", "b"):
        letters = letters[:-1]
    base = 1024 if letters[1:] in ("i", "I") else 1000
    power = _power(letters[:1])
    if not number or power is None or letters[1:] not in ("", "i", "I"):
        raise _refused(text, option, "a size", "80GB (80 x 10^9 bytes), 80GiB (80 x 2^30) or a number of bytes")
    if power and "." in number:
        from fractions import Fraction

        return _bounded(int(Fraction(number) * base**power), option, text, 0)
    return _bounded(_whole(number, base**power, f"{option} {_shown(text)}", "bytes"), option, text, 0)


def _needs_unit(text: str, number: str, letters: str) -> bool:
    """Whether `text` was typed as a number without a unit."""
    return bool(number) and not letters.strip() and not isinstance(text, Number)


def _likely_flops(value: float) -> tuple[str, ...]:
    """The rates that a number below 10^9 probably means: vendors print TFLOPS or PFLOPS, scripts print GFLOPS."""
    if value < 10:
        return _with_letter(value * 1e15), _with_letter(value * 1e12)
    return (_with_letter(value * (1e12 if value < 1e4 else 1e9 if value < 1e7 else 1e6)),)


def _with_letter(value: float) -> str:
    """A number with the largest unit letter for which it is at least 1: 3.35T, 900G."""
    power = max((p for p in range(len(_LETTERS) + 1) if value >= 1000**p), default=0)
    return f"{value / 1000**power:.10g}{'' if power == 0 else _LETTERS[power - 1].upper()}"


def _split(text: str) -> tuple[str, str]:
    """The number at the start of a text, as plain digits with at most one decimal point, and the text after it.

    The number is empty if it is missing or malformed. This does not use a regular expression, because compiling one
    takes milliseconds at every start.
    """
    text = text.strip()
    if len(text) > _MAX_TEXT:
        return "", text
    if text.isascii() and text.isdecimal():
        return text, ""
    end = next((i for i, char in enumerate(text) if char not in "0123456789_.,"), len(text))
    number, rest = text[:end], text[end:]
    whole, point, fraction = number.partition(".")
    if "," in whole:
        # Accept the format in which kvcalc prints numbers: 8,192 and 1,048,576. 8,19 is not a number.
        first, *groups = whole.split(",")
        well_formed = 1 <= len(first) <= 3 and all(len(group) == 3 for group in groups)
        well_formed = well_formed and (first + "".join(groups)).isdigit()
    else:
        well_formed = all(part.isdigit() for part in whole.split("_"))
    well_formed = well_formed and (fraction.isdigit() if point else True)
    return (number.replace("_", "").replace(",", "") if well_formed else ""), rest


def _power(letter: str) -> int | None:
    """The power of a unit letter: 0 for no letter, None for an unknown one."""
    if not letter:
        return 0
    power = _LETTERS.find(letter.lower()) + 1 if len(letter) == 1 else 0
    return power or None


def _whole(number: str, scale: int, what: str, unit: str) -> int:
    if "." not in number:
        return int(number) * scale
    from fractions import Fraction

    value = Fraction(number) * scale
    if value.denominator != 1:
        raise UsageError(f"{what}: not a whole number of {unit}")
    return value.numerator


def _whole_tokens(number: str, scale: int, text: str, option: str) -> int:
    value = int(number) * scale if "." not in number else _whole(number, scale, f"{option} {_shown(text)}", "tokens")
    return _bounded(value, option, text)


def _bounded(value: int, option: str, text: str, least: int = 1, most: int | None = None) -> int:
    """`value`, the number in `text`. UsageError if it is below `least` or above its bound."""
    most = most_of(option) if most is None else most
    if value < least:
        raise UsageError(f"{option} {_shown(text)}: must be at least {least}")
    if value > most:
        raise UsageError(f"{option} {_shown(text)}: must be at most {most:,}")
    return value


def _refused(text: str, option: str, what: str, example: str) -> UsageError:
    return UsageError(f"{option} {_shown(text)}: not {what}", f"write {example}")


def _without_unit(text: str, option: str, what: str, *likely: str) -> UsageError:
    return UsageError(f"{option} {_shown(text)}: {what} needs a unit", f"did you mean {' or '.join(likely)}?")


def _shown(text: str) -> str:
    """A value as shown in an error: quoted if it is empty or has spaces, truncated if it is long."""
    text = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    return text if text.isprintable() and text and " " not in text else ascii(text)
