"""The console as a job: the runs, models and endpoints of a cluster's head in the browser, until the job is stopped.

    shoal run console                                                  # Ctrl-C ends it
    ray job submit --no-wait --working-dir . -- python jobs/console.py # `ray job stop` ends it
    shoal run console host=0.0.0.0 tls.certificate=/etc/web.pem tls.key=/etc/web.key names=[head.lab]

It listens on the loopback of the job's host, and its log has the command of a tunnel. It reads the record there, and
$SHOAL_STORE. docs/console.md says who may do what.
"""

from shoal.flows.run_flow import RunFlow
from shoal.libs.console.job import KIND, ConsoleSpec, run_console

if __name__ == "__main__":
    RunFlow(KIND, ConsoleSpec(), run_console).main()
