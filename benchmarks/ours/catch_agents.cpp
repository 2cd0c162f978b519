// Many agents of one game, Catch, by the client of C++. Built with -I clients/cpp.
//   catch_agents AGENTS SECONDS ROUNDS PORT TOKEN
// ROUNDS: a second, as of a game with a clock, which catches up when it is late; 0: the next one begins at once.
// Prints one JSON object: steps a second, percentiles of the wait for a round's actions, and the mean return.
#include <thread>

#define main play_catch
#include "catch.cpp"
#undef main

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int main(int, char** argv) {
  int agents = std::atoi(argv[1]);
  double seconds = std::atof(argv[2]), period = std::atof(argv[3]) > 0 ? 1 / std::atof(argv[3]) : 0;
  shoal::Run run({std::string("ws://127.0.0.1:") + argv[4]}, argv[5], "catch");
  std::vector<Catch> games(agents);
  std::vector<float> rewards(agents), returns(agents);
  std::vector<double> waits;
  double total = 0, begin = now(), warm = begin + seconds / 4;
  long steps = 0, episodes = 0;
  for (long round = 0; now() < begin + seconds && !run.is_over(); round++) {
    double early = begin + period * round - now();
    if (early > 0) std::this_thread::sleep_for(std::chrono::duration<double>(early));
    for (int i = 0; i < agents; i++) run.ask(i, games[i].observe(), rewards[i]);
    double asked = now();
    run.wait();
    if (asked > warm) waits.push_back(now() - asked), steps += agents;
    for (int i = 0; i < agents; i++) {
      returns[i] += rewards[i] = games[i].step(run.action(i));
      if (!games[i].is_over()) continue;
      run.end(i, games[i].observe(), rewards[i]), games[i] = Catch(), rewards[i] = 0;
      total += returns[i], returns[i] = 0, episodes++;
    }
    run.wait();
  }
  double took = now() - warm;
  std::sort(waits.begin(), waits.end());
  auto at = [&](double share) { return 1e3 * waits[size_t(share * (waits.size() - 1))]; };
  printf("{\"steps_s\": %.0f, \"p50_ms\": %.3f, \"p99_ms\": %.3f, \"episodes\": %ld, \"mean_return\": %.2f}\n",
         steps / took, at(0.5), at(0.99), episodes, total / std::max(1L, episodes));
}
