"""The command line, for libraries: commands and displays."""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.cli.commands.cluster import describe_status
    from shoal.cli.commands.run_session import RunArguments, launch_run
    from shoal.cli.commands.serve_deploy import list_jobs_by_endpoint
    from shoal.cli.display.first_request import begin_curl, can_be_picture, make_request
    from shoal.cli.display.panels import (
        RunView,
        extend_history,
        find_phase,
        render_cells,
        render_counts,
        render_fact,
        render_table,
    )
    from shoal.cli.support.console import (
        PRINTED,
        Printed,
        make_literal_console,
        make_number_column,
        make_table,
        prepare_output_folder,
        print_and_write,
        print_json,
    )
    from shoal.cli.support.endpoint_logs import EndpointLogs
    from shoal.cli.support.jobs import (
        JobLogReader,
        describe_failure,
        find_job,
        follow_output,
        ignore_further_interrupts,
        job_environment,
        validate_overrides,
    )
    from shoal.cli.support.options import (
        Address,
        EndpointName,
        FiniteRange,
        Key,
        ModelName,
        NotNegative,
        OutputFolder,
        Overrides,
        Plain,
        Positive,
        Seconds,
        TaskName,
        Texts,
        VersionName,
        ca_option,
    )
    from shoal.cli.support.verbs import AsJson, CommandGroup, DefaultCommandGroup, verb

__getattr__ = load_on_demand(__name__)
