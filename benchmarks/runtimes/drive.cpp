// drive DECISIONS FOLDER...: of each exported folder the largest difference from its vectors (as vectors.txt has them),
// and the microseconds of a decision.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>

#include POLICY

int main(int count, char** arguments) {
  const int decisions = std::atoi(arguments[1]);
  for (int index = 2; index < count; index++) {
    const std::string folder = arguments[index];
    std::ifstream file(folder + "/policy.json"), table(folder + "/vectors.txt");
    shoal::Policy loaded;
    if (!loaded.load({std::istreambuf_iterator<char>(file), {}})) return std::printf("%s\n", loaded.error.c_str()), 1;
    shoal::Policy policy = loaded;
    if (!policy.act({}).empty() || policy.error.empty()) return std::printf("an empty observation has an action\n"), 1;
    const auto read = [&table] {
      size_t size = 0;
      table >> size;
      shoal::Floats values(size);
      for (float& each : values) table >> each;
      return values;
    };
    double largest = 0;
    shoal::Floats observation, spans;
    std::vector<bool> mask;
    for (int reset; table >> reset;) {
      observation = read();
      const shoal::Floats allowed = read(), state = read(), wanted = read();
      spans = read();
      const shoal::Floats best = read(), sampled = read(), uniforms = read();
      mask.assign(allowed.begin(), allowed.end());
      for (const bool is_sampled : {false, true}) {
        size_t drawn = 0;
        policy.reset();
        if (!reset) policy.state = state;
        policy.sampled = is_sampled;
        policy.random = [&] { return static_cast<double>(uniforms.at(drawn++)); };
        shoal::Floats found = policy.act(observation, mask), expected = is_sampled ? sampled : best;
        for (const shoal::Floats* each : {&policy.outputs, &policy.state}) found.insert(found.end(), each->begin(), each->end());
        expected.insert(expected.end(), wanted.begin(), wanted.end());
        if (found.size() != expected.size()) return std::printf("%s\n", policy.error.c_str()), 1;
        for (size_t i = 0; i < found.size(); i++) {
          const double scale = std::max({1.0f, std::fabs(expected[i]), i < spans.size() ? spans[i] : 0});
          largest = std::max(largest, std::fabs(found[i] - expected[i]) / scale);
        }
      }
    }
    policy.sampled = false;
    const auto began = std::chrono::steady_clock::now();
    for (int i = 0; i < decisions; i++) policy.act(observation, mask);
    const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - began;
    std::printf("%.9f %f\n", largest, taken.count() / std::max(1, decisions));
  }
}
