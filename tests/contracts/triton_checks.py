"""What a stock tritonclient is told of the endpoint, and what it is answered: one check for each thing that it can ask.

Run by `triton_program` with each client class.
"""

import json

import numpy as np
from triton_clients import EDGES, ROWS, same

# -- what there is ----------------------------------------------------------------------------------------------------


def check_health(client):
    assert client.call("is_server_live") is True
    assert client.call("is_server_ready") is True
    assert client.call("is_model_ready", "pair") is True
    assert client.call("is_model_ready", "aged", "2") is True
    assert client.call("is_model_ready", "aged", "9") is False
    assert client.call("is_model_ready", "nobody") is False


def check_metadata(client):
    server = client.json("get_server_metadata")
    assert server["name"] == "shoal"
    assert "binary_tensor_data" in server["extensions"]
    model = client.json("get_model_metadata", "pair")
    assert (model["name"], model["versions"], model["platform"]) == ("pair", ["7"], "shoal_pytorch")
    left = model["inputs"][0]
    assert (left["name"], left["datatype"], [int(size) for size in left["shape"]]) == ("left", "FP32", [-1, 3])
    assert [each["name"] for each in model["outputs"]] == ["total", "rows", "words"]
    assert client.json("get_model_metadata", "aged", "2")["versions"] == ["1", "2", "3"]
    client.refused(404, "'nobody'", calling="get_model_metadata", args=("nobody",))
    client.refused(404, "version", calling="get_model_metadata", args=("aged", "9"))


def check_configuration(client):
    answer = client.json("get_model_config", "pair")
    config = answer["config"] if client.is_grpc else answer
    assert (config["name"], config["max_batch_size"]) == ("pair", 8)
    assert config["output"][2] == {
        "name": "words",
        "data_type": "TYPE_STRING",
        **({} if client.is_grpc else {"dims": []}),
    }
    assert config["dynamic_batching"]["default_queue_policy"]["max_queue_size"] == 1024
    client.refused(404, "'nobody'", calling="get_model_config", args=("nobody",))


def check_statistics(client):
    client.infer("aged", client.input("x", ROWS), model_version="2")
    of_model = client.json("get_inference_statistics", "aged")["model_stats"]
    assert [each["version"] for each in of_model] == ["1", "2", "3"]
    (of_version,) = client.json("get_inference_statistics", "aged", "2")["model_stats"]
    assert int(of_version["inference_count"]) >= 2 * int(of_version["execution_count"]) >= 2
    assert int(of_version["inference_stats"]["success"]["count"]) >= 1
    assert of_version["batch_stats"][0]["batch_size"] in (2, "2")
    everything = client.json("get_inference_statistics")["model_stats"]
    assert {"aged", "pair", "mixed"} <= {each["name"] for each in everything}
    client.refused(404, "'nobody'", calling="get_inference_statistics", args=("nobody",))


def check_repository(client):
    def state(name):
        answer = client.json("get_model_repository_index")
        entries = answer["models"] if client.is_grpc else answer
        return next(each["state"] for each in entries if each["name"] == name)

    assert (state("pair"), state("shelved")) == ("READY", "UNAVAILABLE")
    client.call("load_model", "shelved", config=json.dumps({"max_batch_size": 4}))
    assert state("shelved") == "READY"
    same(client.infer("shelved", client.input("x", ROWS)).as_numpy("x"), ROWS)
    client.call("unload_model", "shelved")
    assert state("shelved") == "UNAVAILABLE"
    client.refused(404, "'shelved'", args=("shelved", [client.input("x", ROWS)]))
    client.refused(404, "'nobody'", calling="load_model", args=("nobody",))
    client.refused(404, "'nobody'", calling="unload_model", args=("nobody",))


# -- inference --------------------------------------------------------------------------------------------------------


def check_every_datatype(client):
    for datatype, array in EDGES.items():
        result = client.infer(f"as_{datatype}", client.input("x", array, datatype))
        same(result.as_numpy("x"), array)
        described = result.get_output("x")
        shape = described.shape if client.is_grpc else described["shape"]
        assert list(shape) == [2, 2]


def check_every_datatype_in_json(client):
    if client.is_grpc:
        return
    for datatype, array in EDGES.items():
        if datatype == "BF16":  # the client sends it as bytes only; it may ask for it in JSON
            given = client.input("x", array, datatype)
        else:
            array = array if datatype != "BYTES" else np.array([[b"", b"plain"], ["K\u00f6ln".encode(), b"y"]], object)
            given = client.input("x", array, datatype, binary=False)
        result = client.infer(f"as_{datatype}", given, outputs=[client.output("x", binary_data=False)])
        if datatype == "BF16":
            numbers = np.array(result.get_output("x")["data"], np.float32)
            assert (numbers == array.astype(np.float32).ravel()).all()
        elif datatype == "BYTES":
            assert [each.encode() for each in result.get_output("x")["data"]] == list(array.ravel())
        else:
            same(result.as_numpy("x"), array)


def check_every_datatype_in_one_request(client):
    result = client.infer("mixed", *(client.input(name.lower(), array, name) for name, array in EDGES.items()))
    for datatype, array in EDGES.items():
        same(result.as_numpy(datatype.lower()), array)


def check_several_inputs_and_outputs(client):
    left, right = client.input("left", ROWS), client.input("right", np.array([10, 20]))
    wanted = ROWS + np.array([[10], [20]], np.float32)
    result = client.infer("pair", right, left, request_id="an id")
    same(result.as_numpy("total"), wanted)
    assert list(result.as_numpy("words")) == [b"row 0", b"row 1"]
    answer = result.get_response()
    assert (answer.id if client.is_grpc else answer["id"]) == "an id"
    assert (answer.model_version if client.is_grpc else answer["model_version"]) == "7"
    few = client.infer("pair", left, right, outputs=[client.output("words"), client.output("total")])
    same(few.as_numpy("total"), wanted)
    assert few.as_numpy("rows") is None


def check_versions(client):
    for version in ("1", "2", "3", ""):
        answer = client.infer("aged", client.input("x", ROWS), model_version=version).get_response()
        assert (answer.model_version if client.is_grpc else answer["model_version"]) == (version or "3")
    client.refused(404, "no version '9'", args=("aged", [client.input("x", ROWS)]), model_version="9")
    client.refused(404, "no version 'new'", args=("aged", [client.input("x", ROWS)]), model_version="new")


def check_options_of_a_request(client):
    x = client.input("x", ROWS)
    client.infer("big", x, priority=3, timeout=60_000_000, parameters={"mine": 1, "other": "text", "flag": True})
    client.infer("big", x, sequence_id=7, sequence_start=True, sequence_end=True)
    client.infer("big", x, headers={"shoal-sticky": "somebody", "shoal-deadline-ms": "60000"})
    client.refused(400, "shoal-deadline-ms", args=("big", [x]), headers={"shoal-deadline-ms": "soon"})
    if client.is_grpc:
        client.infer("big", x, client_timeout=60.0)


def check_compression(client):
    x = client.input("x", ROWS)
    for algorithm in ("gzip", "deflate"):
        if client.is_grpc:
            same(client.infer("big", x, compression_algorithm=algorithm).as_numpy("x"), ROWS)
        else:
            both = {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
            same(client.infer("big", x, **both).as_numpy("x"), ROWS)
