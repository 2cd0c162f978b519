// A policy of Shoal in C++17, for Unreal and anything else: one header, no library. Apache License 2.0.
//   shoal::Policy policy;                              // a copy is for another agent, and has a state of its own
//   if (!policy.load(text)) log(policy.error);         // the content of policy.json
//   policy.reset();                                    // where an episode begins
//   const auto& action = policy.act(observation);      // in C order: int(action[0]) of a Discrete; empty on an error
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace shoal {
using Floats = std::vector<float>;
class Policy {
 public:
  bool sampled = false;  // or the best action is taken
  Floats state, outputs, action;  // at the newest observation
  std::string error;
  std::function<double()> random = [] { return static_cast<double>(engine()) / 4294967296.0; };
  bool load(const std::string& json) {
    const auto size = [&](const char* key) { return static_cast<size_t>(std::atof(find(json, key).c_str())); };
    const auto tensor = [&](const char* key, size_t from) { return read_tensor(find(json, key, from)); };
    error = size("format") == 1 ? find(json, "unsupported") : "its format is not 1";
    if (!error.empty()) return error = "policy.json: " + error + ": run policy.onnx", false;
    kind = find(json, "kind"), sampled = find(json, "action") == "sampled";
    observation_size = size("observation_size"), mask_size = size("mask_size"), state_size = size("state_size");
    low = read_list(json, "action_low"), high = read_list(json, "action_high"), sizes.clear();
    for (const float each : read_list(json, "action_sizes")) sizes.push_back(static_cast<size_t>(each));
    auto found = std::make_shared<std::vector<Layer>>();
    for (size_t at = 0; (at = json.find("\"layer\":", at)) != std::string::npos; ++at)
      found->push_back({find(json, "layer", at), find(json, "activation", at), tensor("weight", at), tensor("bias", at),
                        tensor("weight_h", at), tensor("bias_h", at)});
    return layers = found, reset(), true;
  }
  void reset() { state.assign(state_size, 0.0f); }  // the next observation begins an episode
  const Floats& act(const Floats& observation, const std::vector<bool>& mask = {}) {  // mask: which choices are allowed
    action.clear(), error.clear(), outputs = observation;
    if (observation.size() != observation_size || mask.size() != mask_size)
      return error = "expected an observation of " + std::to_string(observation_size) + " numbers, and a mask of " +
                     std::to_string(mask_size), action;
    for (const Layer& each : *layers) compute(each);
    for (size_t i = 0, at = 0; i < sizes.size(); at += sizes[i++]) {
      for (size_t j = at; j < at + sizes[i] && mask_size; ++j) outputs[j] = mask[j] ? outputs[j] : -1e9f;
      std::vector<double> scores(outputs.begin() + at, outputs.begin() + at + sizes[i]);
      if (sampled && kind != "epsilon_greedy")  // Gumbel's noise makes the largest one a sample
        for (double& each : scores) each -= std::log(1e-30 - std::log(random()));
      const auto best = std::max_element(scores.begin(), scores.end());
      if (!(*best > -5e8)) return error = "the mask allows no choice, or a number is NaN", action.clear(), action;
      action.push_back(static_cast<float>(best - scores.begin()));
    }
    for (size_t i = 0; i < low.size(); ++i) {  // between low and high, by tanh
      const float log_std = outputs[low.size() + i] = std::clamp(outputs[low.size() + i], -20.0f, 2.0f);
      const double radius = sampled ? std::exp(log_std) * std::sqrt(-2 * std::log(1 - random())) : 0;
      const double u = outputs[i] + (sampled ? radius * std::cos(6.283185307179586 * random()) : 0);
      const double y = (low[i] + high[i]) / 2 + (high[i] - low[i]) / 2 * std::tanh(u);
      action.push_back(std::clamp(static_cast<float>(y), low[i], high[i]));
    }
    return action;
  }
 private:
  struct Layer { std::string kind, activation; Floats weight, bias, weight_h, bias_h; };  // weight: [inputs, outputs]
  std::string kind;
  std::vector<size_t> sizes;
  size_t observation_size = 0, mask_size = 0, state_size = 0;
  Floats low, high;
  std::shared_ptr<const std::vector<Layer>> layers = std::make_shared<std::vector<Layer>>();  // of all copies
  static inline thread_local std::mt19937 engine{std::random_device{}()};
  static Floats multiply(const Floats& weight, Floats y, const Floats& x) {
    for (size_t i = 0; i * y.size() < weight.size(); ++i)
      for (size_t j = 0; j < y.size(); ++j) y[j] += weight[i * y.size() + j] * x[i];
    return y;
  }
  void compute(const Layer& layer) {
    const auto sigmoid = [](float x) { return 0.5f + 0.5f * std::tanh(0.5f * x); };
    Floats x = multiply(layer.weight, layer.bias, outputs), h = multiply(layer.weight_h, layer.bias_h, state);
    const size_t n = layer.kind == "linear" ? 0 : x.size() / (layer.kind == "gru" ? 3 : 4);
    for (size_t i = 0; i < n; ++i) {  // the gates are in torch's order
      const float first = sigmoid(x[i] + h[i]), second = sigmoid(x[n + i] + h[n + i]);
      const float next = std::tanh(x[2 * n + i] + (layer.kind == "gru" ? first : 1) * h[2 * n + i]);
      if (layer.kind == "gru") { state[i] = next + second * (state[i] - next); continue; }
      state[n + i] = second * state[n + i] + first * next;
      state[i] = sigmoid(x[3 * n + i] + h[3 * n + i]) * std::tanh(state[n + i]);
    }
    outputs = n ? Floats(state.begin(), state.begin() + n) : std::move(x);
    if (layer.activation == "tanh") for (float& each : outputs) each = std::tanh(each);
    if (layer.activation == "relu") for (float& each : outputs) each = each < 0 ? 0 : each;
  }
  static std::string find(const std::string& json, const std::string& key, size_t from = 0) {  // keys are unique
    size_t at = json.find('"' + key + "\":", from);
    if (at == std::string::npos) return "";
    at = json.find_first_not_of(" \t\r\n", at + key.size() + 3);
    const char* ends = json[at] == '"' ? "\"" : json[at] == '[' ? "]" : ",}";
    return json.substr(at + (*ends != ','), json.find_first_of(ends, at + 1) - at - (*ends != ','));
  }
  static Floats read_list(const std::string& json, const char* key) {
    Floats result;
    std::istringstream stream(find(json, key));
    stream.imbue(std::locale::classic());  // whose decimal point is not a comma
    for (float each; stream >> each; stream.ignore(99, ',')) result.push_back(each);
    return result;
  }
  static Floats read_tensor(const std::string& text) {  // of base64, little-endian
    const std::string letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string bytes;
    unsigned bits = 0, count = 0;
    for (size_t at = 0; at < text.size() && text[at] != '='; ++at) {
      bits = bits << 6 | static_cast<unsigned>(letters.find(text[at]));
      if ((count += 6) >= 8) bytes += static_cast<char>(bits >> (count -= 8) & 255);
    }
    Floats result(bytes.size() / 4);
    if (!result.empty()) std::memcpy(result.data(), bytes.data(), result.size() * 4);
    return result;
  }
};
}  // namespace shoal
