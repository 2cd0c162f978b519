# What the plugin of godot-rl does in a game, after its protocol, for Godot 3, where it has none: JSON behind its length,
# one message for all agents, and naps of 10 us while it waits for the answer, with the tree paused, as the plugin's.
extends Node

const Field := preload("res://field.gd")
const OBSERVATIONS := {"obs": {"space": "box", "size": [4]}}
const ACTIONS := {"move": {"action_type": "discrete", "size": 3}}

var stream := StreamPeerTCP.new()
var stopwatch = preload("res://stopwatch.gd").new()
var fields := []
var rewards := []
var ends := []
var reply := "" # what the game sends after this tick


func _ready() -> void:
	var options := {}
	for argument in OS.get_cmdline_args():
		if "=" in argument:
			options[argument.split("=")[0]] = argument.split("=")[1]
	randomize()
	for _agent in int(options.agents):
		fields.append(Field.new())
		rewards.append(0.0)
		ends.append(false)
	stopwatch.begin(float(options.seconds))
	if stream.connect_to_host("127.0.0.1", int(options.port)) != OK:
		get_tree().quit(1)
	while stream.get_status() == StreamPeerTCP.STATUS_CONNECTING:
		OS.delay_msec(1)
	stream.set_no_delay(true)
	receive() # handshake
	receive() # env_info
	send({"type": "env_info", "observation_space": OBSERVATIONS, "action_space": ACTIONS, "n_agents": fields.size()})


func send(message: Dictionary) -> void:
	stream.put_utf8_string(to_json(message))


func receive():
	while stream.get_available_bytes() == 0:
		if stream.get_status() != StreamPeerTCP.STATUS_CONNECTED:
			get_tree().quit()
			return {"type": "close"}
		OS.delay_usec(10)
	return parse_json(stream.get_utf8_string())


func _physics_process(_delta) -> void:
	get_tree().paused = true
	if reply:
		var observations := []
		for field in fields:
			observations.append({"obs": field.observe()})
		send({"type": reply, "obs": observations, "reward": rewards, "done": ends})
	var message = receive()
	match message.type:
		"reset":
			reply = "reset"
			for i in fields.size():
				fields[i] = Field.new()
		"action":
			reply = "step"
			for i in fields.size():
				rewards[i] = fields[i].move(int(message.action[i].move))
				ends[i] = fields[i].is_over()
				if ends[i]:
					fields[i] = Field.new()
			if stopwatch.add(fields.size()):
				get_tree().quit()
		"close":
			get_tree().quit()
	get_tree().paused = false
