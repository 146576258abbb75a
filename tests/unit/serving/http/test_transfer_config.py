from __future__ import annotations

import json

import pytest

from sametoken.errors import ConfigError
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.transfer_config import WeightTransferConfig


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("files", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"backend": "rdma"}', "backend"),
        ('{"backend": "ipc", "directory": "/tmp"}', "directory"),
        ('{"backend": 3}', "backend"),
        ('{"backend": "files"}', "directory"),
        ('{"directory": "/nowhere at all"}', "no directory"),
        ('{"backend": "gloo", "directory": "/tmp"}', "directory"),
        ('{"backend": "gloo", "timeout": 0}', "timeout"),
        ('{"backend": "gloo", "timeout": true}', "timeout"),
        ('{"backend": "gloo", "time_out": 1}', "Did you mean 'timeout'"),
    ],
)
def test_what_is_impossible_is_refused(text, told):
    with pytest.raises(ConfigError, match=told):
        ServerConfig(weight_transfer_config=text)


def test_values(tmp_path):
    text = json.dumps({"directory": str(tmp_path)})
    expected = WeightTransferConfig("files", str(tmp_path), 300.0)
    assert ServerConfig(weight_transfer_config=text).weight_transfer == expected
    assert ServerConfig().weight_transfer is None


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_others_need_a_key(host):
    with pytest.raises(ConfigError, match="api_key"):
        ServerConfig(host=host, weight_transfer_config='{"backend": "gloo"}')
    ServerConfig(host=host, weight_transfer_config='{"backend": "gloo"}', api_key=("k",))
