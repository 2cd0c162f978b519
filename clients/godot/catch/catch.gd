# Catch, a game with a clock of its own: apples fall down five columns, and a basket moves left, stays, or moves right.
# godot3-server --path clients/godot/catch --fixed-fps 60 -- address=ws://127.0.0.1:8765 agents=16
extends Node

const COLUMNS := 5
const ROWS := 6
const APPLES := 5 # of an episode: each that is caught gives 1, each that is missed -1

var options := {"address": "ws://127.0.0.1:8765", "agents": "1", "id": "godot", "certificate": ""}
var fields := []
var shoal = preload("res://shoal.gd").new()


class Field:
	var basket := 2
	var apples := 0
	var column := randi() % COLUMNS
	var row := 0

	# One tick; returns the reward.
	func move(action: int) -> float:
		basket = int(clamp(basket + action - 1, 0, COLUMNS - 1))
		row += 1
		if row < ROWS - 1:
			return 0.0
		var reward := 1.0 if column == basket else -1.0
		apples += 1
		column = randi() % COLUMNS
		row = 0
		return reward

	func observe() -> Array:
		return [2.0 * basket / (COLUMNS - 1) - 1, 2.0 * column / (COLUMNS - 1) - 1, 2.0 * row / (ROWS - 1) - 1,
				float(column - basket) / (COLUMNS - 1)]


func _ready() -> void:
	for argument in OS.get_cmdline_args():
		if "=" in argument:
			options[argument.split("=")[0]] = argument.split("=")[1]
	randomize()
	add_child(shoal)
	shoal.connect("action", self, "_on_action")
	shoal.connect("left", self, "_on_left")
	shoal.certificate = options.certificate
	shoal.join(options.address.split(","), OS.get_environment("SHOAL_TOKEN"), options.id)
	for i in int(options.agents):
		fields.append(Field.new())
		shoal.act(i, fields[i].observe())


func _on_action(i: int, action: int) -> void:
	var reward: float = fields[i].move(action)
	if fields[i].apples == APPLES:
		shoal.end(i, fields[i].observe(), reward)
		fields[i] = Field.new()
		reward = 0.0
	shoal.act(i, fields[i].observe(), reward)


func _on_left(reason: String, finished: bool) -> void:
	print(reason)
	get_tree().quit(0 if finished else 1)
