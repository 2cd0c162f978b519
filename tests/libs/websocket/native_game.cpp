// Catch, or with the address `-` first a game that does what lines of stdin say: one Run after the other.
#define main play_catch
#include "catch.cpp"
#undef main

shoal::Tensor read_numbers(std::istream& line) {
  std::string list, each;
  shoal::Tensor numbers;
  line >> list;
  for (std::istringstream listed(list); std::getline(listed, each, ',');) numbers.push_back(std::stod(each));
  return numbers;
}

void obey(shoal::Run& run, std::istringstream& line, const std::string& verb) {
  int agent = 0, how = 0;
  float reward = 0;
  std::string text;
  line >> agent;
  if (verb == "wait") return run.wait();
  if (verb == "connect") return run.connect();
  if (verb == "leave") return run.leave();
  if (verb == "take") return run.take_over(agent, read_numbers(line));
  if (verb == "show") {
    std::cout << "action";
    for (double each : run.action(agent).values) std::cout << " " << each;
    std::cout << " of " << run.action(agent).version << (run.is_over() ? ", over" : "");
    if (run.diverged_at >= 0) std::cout << ", another game from step " << run.diverged_at;
    std::cout << std::endl;
    return;
  }
  line >> text;
  reward = std::strtof(text.c_str(), nullptr);
  if (verb == "end") line >> how;
  shoal::Tensor observation = read_numbers(line), mask = read_numbers(line);
  if (verb == "end") run.end(agent, observation, reward, how, mask);
  else run.ask(agent, observation, reward, mask);
}

int main(int argc, char** argv) {
  if (std::string(argv[1]) != "-") return play_catch(argc, argv);
  std::unique_ptr<shoal::Run> run;
  for (std::string text, verb, address; std::getline(std::cin, text);) {
    std::istringstream line(text);
    line >> verb;
    try {
      if (verb == "join" || verb == "play") {
        line >> address;
        shoal::Options options;
        bool plays = verb == "play";
        line >> options.give_up_s;
        if (plays && std::getenv("OFFERS")) options.offers = std::getenv("OFFERS");
        if (!plays) options.behaviour = "human", options.offers = "{\"action\":{\"dtype\":\"int64\"}}";
        options.on_settings = [](const shoal::Json& values) { std::cout << "gravity " << values["gravity"].number << std::endl; };
        if (address.find(".json") != std::string::npos) options.replay = address;
        run.reset();
        run = std::make_unique<shoal::Run>(std::vector<std::string>{address}, plays ? std::getenv("SHOAL_TOKEN") : "a \"token\"", "game", std::move(options));
      } else obey(*run, line, verb);
    } catch (const shoal::Error& error) {
      std::cout << "error " << error.code << " " << error.agent << " " << error.what() << std::endl;
    }
  }
}
