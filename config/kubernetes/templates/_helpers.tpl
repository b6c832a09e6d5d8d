{{- define "sluice.labels" -}}
app.kubernetes.io/name: sluice
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sluice.engine" -}}
{{- printf "%s-%s" .release .pool -}}
{{- end -}}

{{- define "sluice.securityContext" -}}
readOnlyRootFilesystem: true
allowPrivilegeEscalation: false
capabilities: { drop: [ALL] }
{{- end -}}

{{- define "sluice.check" -}}
{{- range .Values.pools -}}
{{- if and .autoscale (not .managed) -}}
{{- if eq .autoscale.kind "gateway" -}}
{{- fail (printf "pool %s is not managed, so the gateway cannot set its replicas: set managed to true, or autoscale.kind to keda or hpa" .name) -}}
{{- end -}}
{{- end -}}
{{- if and .managed (not .engines) -}}
{{- fail (printf "pool %s is managed and has no engines: set managed to false for pods that are made elsewhere" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "sluice.pdbVersion" -}}
{{- if semverCompare ">=1.21-0" .Capabilities.KubeVersion.Version }}policy/v1{{ else }}policy/v1beta1{{ end -}}
{{- end -}}

{{- define "sluice.toml" -}}
[server]
listen = "0.0.0.0:8080"
admin = "0.0.0.0:8081"        # Prometheus scrapes it; changes need the token
lame_duck = "{{ .Values.lameDuckSeconds }}s"             # not ready and still serving, until Services and load balancers have noticed
drain_timeout = "{{ .Values.drainSeconds }}s"

[auth]
admin_token = "env:SLUICE_ADMIN_TOKEN"

[fleet]
state = "/var/lib/sluice/state"

[log]
format = "json"
{{- if gt (int .Values.replicas) 1 }}

# Several gateways hold one limit, and one of them leads.
[cluster]
kubernetes = {}
key = "{{ .Release.Name }}-ledger"
mode = {{ .Values.clusterMode | quote }}
leader = {{ .Values.leader | quote }}
{{- end }}
{{- with .Values.config }}

{{ . | trim }}
{{- end }}
{{- $root := . }}
{{- range .Values.pools }}

[[pool]]
name = {{ .name | quote }}
{{- with .config }}
{{ . | trim }}
{{- end }}
{{- with .autoscale }}

[pool.autoscale]
{{- if eq .kind "gateway" }}
apply = true
{{- end }}
min = {{ int64 .min }}
max = {{ int64 .max }}
{{- with .coldStart }}
cold_start = {{ . | quote }}
{{- end }}
{{- with .downAfter }}
down_after = {{ . | quote }}
{{- end }}
{{- with .idleAfter }}
idle_after = {{ . | quote }}
{{- end }}
{{- with .hold }}
hold = {{ . | quote }}
{{- end }}
{{- with .rate }}
rate = {{ float64 . }}
{{- end }}
{{- end }}

[pool.kubernetes]
selector = "sluice.dev/pool={{ .name }},app.kubernetes.io/instance={{ $root.Release.Name }}"
port = {{ .port | default 8000 }}
{{- if .managed }}
statefulset = {{ include "sluice.engine" (dict "release" $root.Release.Name "pool" .name) | quote }}

[pool.kubernetes.args]
{{- range $flag, $value := .args }}
{{- if kindIs "float64" $value }}
{{ $flag }} = {{ if eq (float64 (int64 $value)) $value }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}
{{- else }}
{{ $flag }} = {{ $value | toJson }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
