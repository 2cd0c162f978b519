# A policy of Shoal in GDScript, of Godot 3 and of Godot 4, with PolicyLayer.gd next to it. Apache License 2.0.
#
#   var policy = preload("res://Policy.gd").new(description)      # the content of policy.json, parsed
#   policy.reset()                                                # where an episode begins
#   var action = policy.act(observation)                          # an int of a Discrete, else an Array in C order
const PolicyLayer = preload("PolicyLayer.gd")
const MASKED := -1e9       # the output of a choice that is not allowed

var spec: Dictionary
var layers := []
var sampled := false       # or the best action is taken
var state := []
var outputs := []          # at the newest observation
var uniforms := []         # are drawn before numbers of randf()


func _init(description: Dictionary, other = null) -> void:
	spec = description
	if spec.format != 1 or spec.unsupported:
		push_error("policy.json: its format is not 1, or %s: run policy.onnx" % spec.unsupported)
		return
	sampled = other.sampled if other else spec.action == "sampled"
	layers = other.layers if other else []
	for each in [] if other else spec.layers:
		layers.append(PolicyLayer.new(each))
	reset()


# The same policy for another agent, which has its own state.
func copy():
	return get_script().new(spec, self)


# The next observation begins an episode.
func reset() -> void:
	state = []
	for _i in range(int(spec.state_size)):
		state.append(0.0)


# The action at an observation, which is flat. mask: of each choice whether it is allowed. Returns null after an error.
func act(observation: Array, mask := []):
	if observation.size() != spec.observation_size or mask.size() != spec.mask_size:
		var sizes := [observation.size(), mask.size(), spec.observation_size, spec.mask_size]
		push_error("observation and mask: %d and %d numbers, expected %d and %d" % sizes)
		return null
	outputs = observation
	for layer in layers:
		outputs = layer.compute(outputs, state)
	if spec.action_low:
		return _bound(spec.action_low, spec.action_high)
	var action := []
	var begin := 0
	for size in spec.action_sizes:
		for i in range(begin, begin + int(size) if mask else begin):
			outputs[i] = outputs[i] if mask[i] else MASKED
		action.append(_choose(begin, begin + int(size)))
		begin += int(size)
	if null in action:
		return null
	return action if spec.action_shape else action[0]


func _choose(begin: int, end: int):
	var best := begin
	var highest := -INF
	for i in range(begin, end):
		var score: float = outputs[i]
		if sampled and spec.kind != "epsilon_greedy":      # Gumbel's noise makes the largest one a sample
			score -= log(1e-30 - log(_draw()))
		if score > highest:
			highest = score
			best = i
	if highest < MASKED / 2.0:
		push_error("the mask allows no choice, or a number is NaN")
		return null
	return best - begin


func _bound(low: Array, high: Array) -> Array:             # by tanh
	var action := []
	for i in range(low.size()):
		var log_std: float = clamp(outputs[low.size() + i], -20.0, 2.0)
		outputs[low.size() + i] = log_std
		var noise := sqrt(-2.0 * log(1.0 - _draw())) * cos(2.0 * PI * _draw()) if sampled else 0.0
		var y := tanh(outputs[i] + exp(log_std) * noise)
		action.append(clamp((low[i] + high[i]) / 2.0 + (high[i] - low[i]) / 2.0 * y, low[i], high[i]))
	return action


func _draw() -> float:
	return uniforms.pop_front() if uniforms else min(randf(), 0.9999999)
