{{- define "headrace.labels" -}}
{app.kubernetes.io/name: headrace, app.kubernetes.io/instance: {{ .Release.Name | quote }}}
{{- end }}
{{- /* Names of the server: its option, and those of ingress and route, which else lead to the router. */ -}}
{{- define "headrace.hosts" -}}
{{- $names := compact (splitList "," (dig "hosts" "" .Values.options)) }}
{{- if not .Values.router.replicas }}
{{- $names = concat $names (compact (list .Values.ingress.host)) }}
{{- if .Values.httpRoute.gateway }}{{ $names = concat $names .Values.httpRoute.hostnames }}{{ end }}
{{- end }}
{{- $names | uniq | join "," | replace "*." "." }}
{{- end }}
{{- define "headrace.annotations" -}}
headrace.dev/profile: {{ .Values.profile.digest | quote }}
# What changes in them starts the pods anew.
headrace.dev/settings: {{ printf "%s%s%s" (toJson .Values.options) (toJson .Values.trusted) (include "headrace.hosts" .) | sha256sum | trunc 16 | quote }}
{{- end }}
{{- /* Are profile and weights mounted by the cluster, as image volumes? On by default since 1.35. */ -}}
{{- define "headrace.mounted" -}}
{{- $way := .Values.weights.from }}
{{- if or (eq $way "volume") (and (eq $way "auto") (semverCompare ">=1.35-0" .Capabilities.KubeVersion.Version)) }}true{{ end }}
{{- end }}
{{- define "headrace.resources" -}}
{{- $limits := .Values.resources.limits | default dict }}
{{- with .Values.gpu }}{{ if .count }}{{ $limits = merge (dict .resource (toString .count)) $limits }}{{ end }}{{ end }}
{{- $found := dict "requests" (.Values.resources.requests | default dict) }}
{{- if $limits }}{{ $_ := set $found "limits" $limits }}{{ end }}
{{- toJson $found }}
{{- end }}
{{- define "headrace.container" -}}
securityContext:
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
resources: {{ include "headrace.resources" . }}
volumeMounts:
  - {name: cache, mountPath: /cache}
  {{- if include "headrace.mounted" . }}
  - {name: profile, mountPath: /profile, readOnly: true}
  - {name: weights, mountPath: /weights, readOnly: true}
  {{- with .Values.weights.panels }}
  - {name: panels, mountPath: /panels, readOnly: true}
  {{- end }}
  {{- else }}
  - {name: store, mountPath: /cache/factory/store}
  {{- end }}
  - {name: trusted, mountPath: /cache/factory/trusted, readOnly: true}
  - {name: settings, mountPath: /etc/headrace, readOnly: true}
  - {name: tmp, mountPath: /tmp}
{{- end }}
{{- define "headrace.pod" -}}
{{- $mounted := include "headrace.mounted" . -}}
{{- /* A pod's cache ends with it: repacked weights that are written there are written for nobody. */ -}}
{{- $alone := ternary "" ", --no-keep-packed" (and (eq $mounted "true") (ne .Values.weights.panels "")) }}
automountServiceAccountToken: false
terminationGracePeriodSeconds: {{ add 30 (int64 (dig "drain_seconds" 30 .Values.options)) }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- if and .Values.gpu.count .Values.gpu.runtimeClass }}
runtimeClassName: {{ .Values.gpu.runtimeClass | quote }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: {matchLabels: {{ include "headrace.labels" . }}}
securityContext: &pod
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- if not $mounted }}
initContainers:
  # Profile and weights, by digest; a signature that no trusted key made ends the pod.
  - name: load
    image: {{ .Values.image | quote }}
    args: [factory, load, {{ .Values.profile.reference | quote }}]
    {{- include "headrace.container" . | nindent 4 }}
{{- end }}
containers:
  - name: {{ ternary "kserve-container" "serve" (eq .Values.frame "InferenceService") }}
    image: {{ .Values.image | quote }}
    {{- if $mounted }}
    args: [serve, {{ .Values.weights.path | quote }}, --offline, --profile, /profile/profile.dsse.json, --config, /etc/headrace/options.toml{{ $alone }}]
    {{- else }}
    args: [serve, --offline, --profile, {{ .Values.profile.digest | quote }}, --config, /etc/headrace/options.toml{{ $alone }}]
    {{- end }}
    ports: [{name: http, containerPort: 8000}]
    {{- with .Values.probes }}
    startupProbe: {httpGet: {path: /v1/health/ready, port: http}, periodSeconds: 2, failureThreshold: {{ divf .startSeconds 2 | ceil }}}
    readinessProbe: {httpGet: {path: /v1/health/ready, port: http}, periodSeconds: {{ .readySeconds }}}
    livenessProbe: {httpGet: {path: /v1/health/live, port: http}, periodSeconds: {{ .liveSeconds }}, failureThreshold: 6}
    {{- end }}
    # Time for the endpoints to be told; then SIGTERM, which finishes what runs.
    lifecycle: {preStop: {sleep: {seconds: 5}}}
    {{- include "headrace.container" . | nindent 4 }}
volumes:
  - {name: cache, emptyDir: {}}
  {{- if $mounted }}
  # Signature and digests are checked by the server, as those of files that were loaded.
  - {name: profile, image: {reference: {{ .Values.profile.reference | quote }}, pullPolicy: IfNotPresent}}
  - {name: weights, image: {reference: {{ .Values.weights.reference | quote }}, pullPolicy: IfNotPresent}}
  {{- with .Values.weights.panels }}
  - {name: panels, image: {reference: {{ . | quote }}, pullPolicy: IfNotPresent}}
  {{- end }}
  {{- else }}
  - {name: store, emptyDir: {}}
  {{- end }}
  - {name: tmp, emptyDir: {}}
  - {name: trusted, configMap: {name: {{ printf "%s-trusted" .Release.Name }}}}
  - {name: settings, configMap: {name: {{ printf "%s-settings" .Release.Name }}}}
{{- end -}}
