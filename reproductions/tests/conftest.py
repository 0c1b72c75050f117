"""Fixtures shared by the tests of the reproductions."""

from __future__ import annotations

from common_fixtures import dropped_net as dropped_net
from common_fixtures import one_process as one_process
from common_fixtures import shared_data as shared_data
