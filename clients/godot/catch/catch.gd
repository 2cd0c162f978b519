# Catch, with any number of fields, each played by an agent of a Shoal run:
# SHOAL_TOKEN=... godot3-server --path clients/godot/catch --fixed-fps 60 address=ws://127.0.0.1:8765 agents=16
extends Node

const Field := preload("res://field.gd")

var options := {"address": "ws://127.0.0.1:8765", "agents": "1", "id": "godot", "certificate": ""}
var fields := []
var shoal = preload("res://shoal.gd").new()


func _ready() -> void:
	for argument in OS.get_cmdline_args():
		if "=" in argument:
			options[argument.split("=")[0]] = argument.split("=")[1]
	randomize()
	add_child(shoal)
	shoal.connect("action", self, "_on_action")
	shoal.connect("left", self, "_on_left")
	shoal.certificate = options.certificate
	shoal.offers = {"name": "catch", "observation": [4], "action": 3}
	shoal.join(options.address.split(","), OS.get_environment("SHOAL_TOKEN"), options.id)
	for i in int(options.agents):
		fields.append(Field.new())
		shoal.act(i, fields[i].observe())


func _on_action(i: int, action: int) -> void:
	var reward: float = fields[i].move(action)
	if fields[i].is_over():
		shoal.end(i, fields[i].observe(), reward)
		fields[i] = Field.new()
		reward = 0.0
	shoal.act(i, fields[i].observe(), reward)


func _on_left(reason: String, finished: bool) -> void:
	print(reason)
	get_tree().quit(0 if finished else 1)
