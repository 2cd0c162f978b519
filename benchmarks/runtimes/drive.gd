# godot3-server -s drive.gd DECISIONS FOLDER...: of each exported folder the largest difference from its vectors, and the
# microseconds of a decision.
extends SceneTree

func _init() -> void:
	var arguments := OS.get_cmdline_args()
	var first := Array(arguments).find("drive") + 1
	var decisions := int(arguments[first])
	for index in range(first + 1, arguments.size()):
		var vectors: Array = read(arguments[index] + "/vectors.json")
		var policy = load(arguments[index] + "/Policy.gd").new(read(arguments[index] + "/policy.json")).copy()
		var largest := compare(policy, vectors)
		policy.sampled = false
		var began := OS.get_ticks_usec()
		for _i in range(decisions):
			policy.act(vectors[0].observation, vectors[0].mask)
		print("%.9f %f" % [largest, (OS.get_ticks_usec() - began) / float(max(1, decisions))])
	quit()

func compare(policy, vectors: Array) -> float:
	var largest := 0.0
	for vector in vectors:
		for is_sampled in [false, true]:
			policy.reset()
			policy.state = policy.state if vector.reset else vector.state.duplicate()
			policy.sampled = is_sampled
			policy.uniforms = vector.uniforms.duplicate()
			var action = policy.act(vector.observation, vector.mask)
			var found: Array = (action if action is Array else [action]) + policy.outputs + policy.state
			var wanted: Array = (vector.sampled if is_sampled else vector.action) + vector.outputs + vector.next_state
			for i in range(wanted.size()):
				var low: Array = policy.spec.action_low
				var scale: float = policy.spec.action_high[i] - low[i] if i < low.size() else 1.0
				largest = max(largest, abs(found[i] - wanted[i]) / max(max(1.0, scale), abs(wanted[i])))
	return largest

func read(path: String):
	var file := File.new()
	file.open(path, File.READ)
	return JSON.parse(file.get_as_text()).result
