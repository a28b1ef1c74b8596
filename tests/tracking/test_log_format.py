"""One log format in every process: time, role, level; rich only where a person watches."""

import io
import logging
import re
import subprocess
import sys

from miles_wan.tracking.logs import configure_logging


def capture(role: str, **options: int | str) -> io.StringIO:
    stream = io.StringIO()
    (handler,) = configure_logging(role, **options).handlers  # type: ignore[arg-type]
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(stream)
    return stream


def test_a_line_holds_time_role_level_and_message() -> None:
    stream = capture("trainer-0")
    logging.getLogger("miles_wan.training.worker").warning("lr is %s", 0.1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d trainer-0 WARNING lr is 0\.1\n", stream.getvalue())


def test_a_second_call_replaces_the_first() -> None:
    first = capture("driver")
    second = capture("engine-0")
    logging.getLogger("miles_wan.x").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1
    assert "engine-0" in second.getvalue()


def test_a_handler_on_the_root_logger_does_not_repeat_our_lines() -> None:
    other = io.StringIO()
    handler = logging.StreamHandler(other)
    logging.getLogger().addHandler(handler)
    try:
        capture("reward-0")
        logging.getLogger("miles_wan.x").info("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert other.getvalue() == ""


def test_the_level_is_a_name_or_a_number() -> None:
    stream = capture("driver", level="WARNING")
    logging.getLogger("miles_wan.x").info("hidden")
    logging.getLogger("miles_wan.x").warning("shown")
    assert "hidden" not in stream.getvalue()
    assert "shown" in stream.getvalue()


def test_a_role_with_a_percent_sign_is_text() -> None:
    stream = capture("100%d")
    logging.getLogger("miles_wan.x").info("hello")
    assert " 100%d INFO hello" in stream.getvalue()


def test_into_a_file_there_are_no_colour_codes_even_when_colours_are_forced() -> None:
    code = "from miles_wan.tracking.logs import configure_logging as c; c('driver').info('rollout 1/2')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"FORCE_COLOR": "1", "PATH": ""}, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"[\d-]+ [\d:]+ driver INFO rollout 1/2\n", done.stderr)


def test_the_log_format_costs_no_heavy_import() -> None:
    code = "import sys, miles_wan.tracking.logs; print(*{'torch', 'av', 'matplotlib', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
