"""Each test begins and ends with the logger of the library untouched, so that caplog sees it."""

import logging
from collections.abc import Iterator

import pytest

from miles_wan.tracking.logs import LOGGER_NAME


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    logger = logging.getLogger(LOGGER_NAME)
    before = list(logger.handlers), logger.level, logger.propagate
    logger.handlers, logger.propagate = [], True
    yield
    logger.handlers, logger.level, logger.propagate = before
