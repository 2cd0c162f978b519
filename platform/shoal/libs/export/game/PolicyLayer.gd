# A layer of Policy.gd: nine numbers of a matrix are one Basis, which an engine multiplies at once. Apache License 2.0.
var kind: String           # linear, gru or lstm
var activation: String     # tanh, relu or none
var tensors := {}          # blocks, vectors of the bias, its size; by what they multiply: "" x, "_h" the state
var is_godot_3: bool = Engine.get_version_info().major == 3


func _init(layer: Dictionary) -> void:
	kind = layer.layer
	activation = layer.activation
	for name in ["", "_h"]:
		var bias := _read_floats(layer["bias" + name])
		var weight := _read_floats(layer["weight" + name])
		var columns := []
		for at in range(0, weight.size(), bias.size() if bias else 1):
			columns.append(_pack(weight, at, bias.size()))
		while columns.size() % 3:
			columns.append(_pack(weight, 0, bias.size(), false))
		var blocks := []
		for row in range(int(ceil(bias.size() / 3.0))):
			blocks.append([])
			for i in range(0, columns.size(), 3):
				blocks.back().append(Basis(columns[i][row], columns[i + 1][row], columns[i + 2][row]))
		tensors[name] = [blocks, _pack(bias, 0, bias.size()), bias.size()]


# The outputs at x. A recurrent layer writes its next state.
func compute(x: Array, state: Array) -> Array:
	x = _multiply("", x)
	if kind != "linear":
		x = _advance(x, state)
	for i in range(x.size() if activation else 0):
		x[i] = tanh(x[i]) if activation == "tanh" else (0.0 if x[i] < 0.0 else x[i])
	return x


func _advance(x: Array, state: Array) -> Array:            # the gates are in torch's order
	var n := int(state.size() if kind == "gru" else state.size() / 2.0)
	var after := []
	var h := _multiply("_h", state, n)
	for i in range(n):
		var first := _sigmoid(x[i] + h[i])
		var second := _sigmoid(x[n + i] + h[n + i])
		var next := tanh(x[2 * n + i] + (first if kind == "gru" else 1.0) * h[2 * n + i])
		if kind == "gru":
			state[i] = next + second * (state[i] - next)
		else:
			state[n + i] = second * state[n + i] + first * next
			state[i] = _sigmoid(x[3 * n + i] + h[3 * n + i]) * tanh(state[n + i])
		after.append(state[i])
	return after


func _sigmoid(x: float) -> float:
	return 0.5 + 0.5 * tanh(0.5 * x)


func _multiply(name: String, values: Array, size := -1) -> Array:
	var x := _pack(values, 0, values.size() if size < 0 else size)
	var bias: Array = tensors[name][1]
	var result := []
	for row in range(bias.size()):
		var sum: Vector3 = bias[row]
		var blocks: Array = tensors[name][0][row]
		if is_godot_3:
			for i in range(x.size()):
				sum += blocks[i].xform(x[i])
		else:
			for i in range(x.size()):
				sum += blocks[i] * x[i]
		result.append(sum.x)
		result.append(sum.y)
		result.append(sum.z)
	result.resize(tensors[name][2])
	return result


func _pack(values: Array, begin: int, size: int, is_filled := true) -> Array:
	var packed := []
	for i in range(begin, begin + size - 2 if is_filled else begin, 3):
		packed.append(Vector3(values[i], values[i + 1], values[i + 2]))
	while 3 * packed.size() < size:
		var vector := Vector3()
		for i in range(3 * packed.size(), size if is_filled else 0):
			vector[i % 3] = values[begin + i]
		packed.append(vector)
	return packed


func _read_floats(text: String) -> Array:
	var values := []
	var stream := StreamPeerBuffer.new()
	stream.data_array = Marshalls.base64_to_raw(text)
	for _i in range(int(stream.get_size() / 4.0)):
		values.append(stream.get_float())
	return values
